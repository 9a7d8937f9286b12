"""The cells of a sweep: how axes are read, how cells are named, and what is refused before anything runs."""

import pytest
from support import ROOT

from vitrail.bench.sweep import check_cells, identity, read_axis, read_cells, too_large
from vitrail.errors import UserError

TOY = ROOT / "configs" / "ablate" / "dit_toy.yaml"


def cells(*sweeps, mode="syn", ranks=1, nodes=1):
    return read_cells(sweeps, mode=mode, ranks=ranks, nodes=nodes)


def test_axes_are_read_as_overrides_are():
    assert read_axis("data.batch=16/rank,32/rank").values == (("16/rank",), ("32/rank",))
    assert read_axis("parallel.recompute=none,{every: 2, x: [1, 2]},'a,b'").values == (
        ("none",),
        ("{every: 2, x: [1, 2]}",),
        ("'a,b'",),
    )
    tied = read_axis("parallel.strategy,parallel.group=DDP:null,HYBRID_SHARD:2")
    assert tied.keys == ("parallel.strategy", "parallel.group")
    assert tied.values == (("DDP", "null"), ("HYBRID_SHARD", "2"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data.batch", "expected KEY=A,B,C"),
        ("data.batch=1,,2", "not a value"),
        ("a,b=1:2,3", "expected A:B"),
        ("a,a=1:2", "twice"),
        ("a=1,1", "twice"),
    ],
)
def test_broken_axes_are_refused(text, words):
    with pytest.raises(UserError, match=words):
        read_axis(text)


def test_cells_are_all_combinations_named_by_what_differs():
    found = cells("data.batch=16/rank,32/rank", "parallel.compile=true,false")
    assert [cell.name for cell in found] == [
        "batch=16/rank,compile=true",
        "batch=16/rank,compile=false",
        "batch=32/rank,compile=true",
        "batch=32/rank,compile=false",
    ]
    assert found[0].keys == {"data.batch": "16/rank", "parallel.compile": True}
    assert found[0].overrides == ("data.batch=16/rank", "parallel.compile=true")
    (only,) = cells()
    assert only.keys == {}
    alike = cells("model.depth=1,2", "model.decoder.depth=1")
    assert alike[1].name == "model.depth=2,model.decoder.depth=1"


def test_names_differ_where_cells_do():
    found = cells("run.name='a b','ab'")
    assert [cell.name for cell in found] == ["name='ab'", "run.name='ab'"]
    assert len({cell.identity for cell in found}) == 2
    with pytest.raises(UserError, match="twice, in other words"):
        cells("model.patch=4,0x4")
    known = {identity({"model.encoder.depth": 1}, "syn"): "depth=1", identity({"data.batch": 8}, "syn"): "b8"}
    found = read_cells(["model.decoder.depth=1,2"], mode="syn", ranks=1, nodes=1, known=known)
    assert [cell.name for cell in found] == ["model.decoder.depth=1", "model.decoder.depth=2"]
    (same,) = read_cells(["data.batch=8"], mode="syn", ranks=1, nodes=1, known=known)
    (other,) = read_cells(["data.batch=8"], mode="io", ranks=1, nodes=1, known=known)
    assert (same.name, other.name) == ("b8", "batch=8,mode=io")
    known = {identity({}, "real"): "as it is"}  # a mode that is swept is the one that was given alone
    found = read_cells(["mode=io,real"], mode="io", ranks=1, nodes=1, known=known)
    assert [cell.name for cell in found] == ["mode=io", "as it is"]
    (alone,) = read_cells([], mode="io", ranks=1, nodes=1, known=known)
    assert (alone.name, alone.identity) == ("mode=io", found[0].identity)


def test_names_of_files_are_plain_and_differ():
    found = cells("data.batch=16/rank,16", "parallel.recompute=none,{every: 2}")
    names = [cell.file for cell in found]
    assert len(set(names)) == 4
    assert not any(set("/{ :") & set(name) for name in names)


def test_mode_ranks_and_nodes_are_swept_beside_the_recipe():
    found = cells("ranks=1,2", "mode=real,syn")
    assert [(cell.ranks, cell.mode, cell.nodes, cell.overrides) for cell in found[1:3]] == [
        (1, "syn", 1, ()),
        (2, "real", 1, ()),
    ]
    for text, words in (("mode=rael", "did you mean 'real'"), ("ranks=0", "above 0"), ("nodes=x", "above 0")):
        with pytest.raises(UserError, match=words):
            cells(text)
    with pytest.raises(UserError, match="swept twice"):
        cells("data.batch=1", "data.batch=2")


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("data.batc=1,2", "^--sweep data.batc=1: .*did you mean 'batch'"),
        ("batch=1,2", "did you mean 'data.batch'"),
        ("stratgy=DDP", "did you mean 'parallel.strategy'"),
        ("parallel.strategy=DDP,FULLSHARD", "strategy=FULLSHARD.*did you mean 'FULL_SHARD'"),
        ("data.batch=1,-1", "batch=-1.*above 0"),
        ("parallel.strategy=DDP,HYBRID_SHARD", "parallel.group is missing"),
        ("parallel.tensor=1,2", "tensor=2.*does not divide the 1 ranks"),
        ("a b=1", "dotted key"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_name_of_its_cell(sweep, words):
    with pytest.raises(UserError, match=words):
        check_cells(TOY, (), cells(sweep))


def test_a_whole_section_may_be_swept_and_keys_may_go_together():
    found = check_cells(TOY, (), cells("parallel.prefetch={forward: 1},{forward: 2}"))
    assert [recipe.parallel.prefetch.forward for recipe in found.values()] == [1, 2]
    tied = cells("parallel.strategy,parallel.group=DDP:null,HYBRID_SHARD:2", ranks=2)
    assert [recipe.parallel.group for recipe in check_cells(TOY, (), tied).values()] == [None, 2]


def test_larger_batches_need_not_be_tried_with_the_same_other_keys():
    small, large, other, unit = cells("data.batch,parallel.compile=8/rank:true,16/rank:true,16/rank:false,16:true")
    oom = [{"name": small.name, "status": "oom", "keys": small.keys, "mode": "syn"}]
    assert too_large(large, [oom[0] | {"mode": "io"}]) is None
    assert too_large(large, oom) == small.name
    assert too_large(small, oom) is None
    assert too_large(other, oom) is None
    assert too_large(unit, oom) is None
    assert too_large(large, [oom[0] | {"status": "failed"}]) is None
    assert too_large(small, [oom[0] | {"name": large.name, "keys": large.keys}]) is None
