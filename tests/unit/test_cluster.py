"""Clusters: every file of the package is sound, curves interpolate, and mistakes are named."""

import dataclasses

import pytest

from vitrail.cost.cluster import FOLDER, Link, at, list_clusters, load_cluster, write_cluster
from vitrail.errors import UserError
from vitrail.layers.flops import peak_tflops


def test_a_curve_is_interpolated_over_the_logarithm_and_flat_outside() -> None:
    curve = ((10.0, 0.2), (1000.0, 0.6))
    assert at(curve, 1) == 0.2
    assert at(curve, 100) == pytest.approx(0.4)
    assert at(curve, 1e6) == 0.6
    assert at(((1.0, 0.5),), 7) == 0.5


def test_the_promised_clusters_are_there() -> None:
    sizes = {name: (load_cluster(name).nodes, load_cluster(name).gpus_per_node) for name in list_clusters()}
    assert sizes["gh200"] == (42, 4)
    assert sizes["frontier"] == (9408, 8)
    assert sizes["dgx_a100"][1] == sizes["dgx_h100"][1] == 8
    assert sizes["h200"] == sizes["laptop"] == (1, 1)


@pytest.mark.parametrize("name", list_clusters())
def test_a_cluster_is_sound_and_comes_back_as_written(name: str, tmp_path) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert len(cluster.source) > 20
    assert isinstance(hash(cluster), int)  # results are cached by it
    for curve in (cluster.device.gemm, cluster.device.gemm_fp32, cluster.device.convolution):
        assert all(0 < share <= 1 for _, share in curve)
    peak = peak_tflops(cluster.device.name)
    assert peak in (None, cluster.device.tflops["bf16"])  # MFU of a plan and of a run are of the same peak
    assert (peak is None) == (cluster.device.name == "cpu")
    write_cluster(cluster, tmp_path / "mine.yaml")
    assert load_cluster(tmp_path / "mine.yaml") == cluster


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'frontir'.*did you mean 'frontier'.*dgx_a100, dgx_h100.*YAML file"):
        load_cluster("frontir")
    with pytest.raises(UserError, match=r"there is no such file"):
        load_cluster("nowhere/cluster.yaml")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("nodes: 1\n", "nodes: 0\n", "nodes: expected a number above 0, got 0"),
        ("nodes: 1\n", "nodes: many\n", "yaml: nodes: expected a valid integer, got 'many'"),
        ("{latency_us: 30, gb_s: 5}", "7", "yaml: inside: expected {latency_us: ..., gb_s: ...}, got 7"),
        ("nodes: 1\n", "", "yaml: nodes is missing: give a whole number"),
        ("nodes: 1\n", "nodes: 1\nprice: .inf\n", "price: expected a number of 0 or more, got inf"),
        ("nodes: 1\n", "nodes: 1\nnode: 1\n", "yaml: node: unknown key; did you mean 'nodes'"),
        ("overlap: 0.0", "overlap: 2", "overlap: expected a share from 0 to 1, got 2"),
        (
            "overlap: 0.0",
            "hop_congestion: [[8, 1], [4, 0.5]]",
            "hop_congestion: expected points .* x above 0 and rising",
        ),
        (
            "overlap: 0.0",
            "checked: [{strategy: DDP, parameters: 1.0e+6, gpus: [8, 16], errors: [0.1]}]",
            r"checked: expected an error for each number of GPUs, got gpus \[8, 16\] and errors \[0.1\]",
        ),
        ("overlap: 0.0", "checked: [{strategies: DDP}]", "strategies: unknown key; did you mean 'strategy'"),
        ("overlap: 0.0", "overlap_reduce: -1", "overlap_reduce: expected a share from 0 to 1, got -1"),
        ("launch_us: 8", "launch_us: 8\n  gemm_odd: 0", "device.gemm_odd: expected a share above 0 up to 1, got 0"),
        ("launch_us: 8", "lunch_us: 8", r"yaml: device.lunch_us: unknown key; did you mean 'launch_us'"),
        ("0.7]]", "1.7]]", "yaml: device.gemm: expected .* shares above 0 up to 1"),
        ("{bf16: 0.4, fp32: 0.4}", "{bf16: 0.4, fp16: 0.4}", "yaml: device.tflops: .*fp32, float8, got .*fp16"),
        ("[[1.0e+6, 0.2], [1.0e+8, 0.5], [1.0e+10, 0.7]]", "[[5, 0.2], [1, 0.5]]", "gemm.*x above 0 and rising"),
        ("fragmentation: 1.0", "fragmentation: 0.5", "fragmentation: expected 1 or more"),
        ("launch_us: 8", "launch_us: 8\n  attention_tile: 0", "attention_tile: expected a number above 0, got 0"),
        (
            "launch_us: 8",
            "launch_us: 8\n  elementwise: [[1.0e+6, 0.5]]",
            "device.elementwise: expected a curve for each kind, .*calibrate.*, got",
        ),
        (
            "launch_us: 8",
            "launch_us: 8\n  elementwise: {sparse: [[1.0e+6, 0.5]]}",
            "device.elementwise: expected curves of any of dense, strided, .* got sparse",
        ),
        (
            "[[4, 0.2], [32, 0.4], [128, 0.5]]",
            "[[1.0e+8, 0.2]]",
            r"convolution: expected points .channels, .*calibrate again",
        ),
        ("{bf16: 0.4, fp32: 0.4}", "{fp32: 0.4}", "tflops: expected peaks above 0, of bf16 and"),
        (
            "{latency_us: 30, gb_s: 5}",
            "{latency_us: 30, gb_s: -5}",
            r"yaml: (inside|between).gb_s: expected a",
        ),
    ],
)
def test_a_wrong_file_is_named_with_its_key(old: str, new: str, words: str, tmp_path) -> None:
    text = (FOLDER / "laptop.yaml").read_text()
    assert old in text
    (tmp_path / "wrong.yaml").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=words) as raised:
        load_cluster(tmp_path / "wrong.yaml")
    assert str(tmp_path / "wrong.yaml") in str(raised.value)


def test_a_list_is_no_cluster(tmp_path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="expected the keys of a cluster"):
        load_cluster(tmp_path / "list.yaml")


def test_a_peak_that_a_device_lacks_is_guessed_low() -> None:
    a100 = load_cluster("dgx_a100")
    assert a100.device.peak("fp32") == 19.5e12
    bare = dataclasses.replace(a100.device, tflops={"bf16": 100.0})
    assert bare.peak("fp32") == 50e12
    assert bare.peak("float8") == 100e12
    assert dataclasses.replace(a100, inside=Link(1.0, 2.0)) != a100
