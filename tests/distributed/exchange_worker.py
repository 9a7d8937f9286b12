"""Ranks that fetch rows and planes from each other: `exchange_worker.py`; every check of test_exchange.py."""

import torch
import torch.distributed as dist

from vitrail.cli.words import end
from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.layers.convolutions import ALL, ConvBlock
from vitrail.layers.patches import Part, Slab, join
from vitrail.layers.tokens import gather_tokens
from vitrail.layers.variables import VariablesConfig
from vitrail.models.config import EncoderConfig
from vitrail.models.mae import DecoderConfig, MAEConfig, RandomMask, StratifiedMask
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.parallel import split as exchange
from vitrail.parallel.planes import SharedPlanes
from vitrail.parallel.split import Lists, Split, fetch_rows

DTYPES = (torch.uint8, torch.int16, torch.int32, torch.float32, torch.bfloat16, torch.float64)
sent: list[int] = []  # bytes of each call
plain = dist.all_to_all_single


def counted(out: torch.Tensor, given: torch.Tensor, **options: object) -> object:
    assert given.dtype == torch.uint8
    sent.append(given.numel())
    return plain(out, given, **options)


def check_rows(group: dist.ProcessGroup) -> None:
    """Any rows of any rank, uneven, repeated or none at all."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for seed, dtype in enumerate(DTYPES):
        generator = torch.Generator().manual_seed(seed)
        batch, rows, width = 3, 5, 7
        everything = torch.randint(0, 200, (batch, world * rows, width), generator=generator).to(dtype)
        mine = everything[:, rank * rows : (rank + 1) * rows]  # not contiguous
        lists = [torch.randint(0, world * rows, (batch, 4 + i), generator=generator) for i in range(world)]
        lists[0] = lists[0] % rows  # one rank asks for its own alone
        lists[1] = lists[1] % rows  # one for none of its own
        found = fetch_rows(mine, lists, group)
        assert found.dtype == dtype
        assert torch.equal(found, gather_tokens(everything, lists[rank]))
    before = len(sent)
    own = [torch.randint(0, rows, (batch, 4)) * 0 + i * rows for i in range(world)]
    assert torch.equal(fetch_rows(mine, own, group), gather_tokens(everything, own[rank]))
    assert torch.equal(fetch_rows(mine, [o[:, :0] for o in own], group), mine[:, :0])
    assert len(sent) == before  # nothing travels


def check_objective(group: dist.ProcessGroup, *, stratified: bool, separate: bool) -> None:
    """Inputs and targets of slabs are parts of those of whole samples."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    part = Part(rank, world)
    variables = VariablesConfig(known=("a", "b"), aggregate="none") if separate else None
    config = MAEConfig(
        encoder=EncoderConfig(width=16, depth=1, heads=2, patch=4, variables=variables),
        decoder=DecoderConfig(kind="self", width=16, depth=1, heads=2),
        mask=StratifiedMask(ratio=0.7, slabs=4) if stratified else RandomMask(ratio=0.7),
        ndim=3,
        channels=2,
        shape=16,
    )
    objective = ReconstructConfig(on="all").build(config, Statistics((3.0, 5.0), (2.0, 4.0)))
    values = torch.randint(0, 256, (2, 2, 16, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    draws, names = Draws(0, [5, 6]), ("a", "b")
    inputs, targets = objective.prepare(Batch([5, 6], values, None, names), draws)
    split = Split(config, part, group)
    slab = split.slab(objective, (16, 16, 16))
    assert slab == Slab(part, (16, 16, 16))
    batch = Batch([5, 6], values[:, :, slab.rows.start : slab.rows.stop], None, names, slab)
    before = len(sent)
    mine, own = split.prepare(objective, batch, draws)
    travelled = len(sent) - before
    assert (travelled > 0) != stratified
    assert own.tokens is None
    groups = 2 if separate else 1
    pieces = [torch.empty_like(mine["x"]) for _ in range(world)]
    dist.all_gather(pieces, mine["x"].contiguous(), group=group)
    assert torch.equal(join(pieces, inputs["x"].shape[1], groups=groups), inputs["x"])
    pieces = [torch.empty_like(own.values) for _ in range(world)]
    dist.all_gather(pieces, own.values.contiguous(), group=group)
    assert torch.equal(Lists(targets.lengths, groups).join(pieces), targets.values)


def check_planes(group: dist.ProcessGroup, *, compiled: bool) -> None:
    """A block of convolutions gives on slabs what it gives on whole maps, and so do its gradients."""
    planes, number = SharedPlanes(group, 7), 7
    rows = planes.rows(number)
    torch.manual_seed(0)
    block = ConvBlock(3, 3, 4, residual=True, affine=True).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 3, number, 6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, number, 6, 5, dtype=torch.float64)
    whole = block(x)
    expected = torch.autograd.grad((whole * weight).sum(), [x, *block.parameters()])
    for module in block.modules():
        if getattr(module, "planes", None) is ALL:
            module.planes = planes  # type: ignore[assignment]
    mine = x.detach()[:, :, rows.start : rows.stop].clone().requires_grad_()
    if compiled:  # graphs and their gradients, without kernels
        block.compile(backend="aot_eager", fullgraph=True)
    out = block(mine)
    found = torch.autograd.grad((out * weight[:, :, rows.start : rows.stop]).sum(), [mine, *block.parameters()])
    torch.testing.assert_close(out, whole[:, :, rows.start : rows.stop])
    torch.testing.assert_close(found[0], expected[0][:, :, rows.start : rows.stop])
    for one, other in zip(found[1:], expected[1:], strict=True):
        dist.all_reduce(one, group=group)
        torch.testing.assert_close(one, other)


def main() -> None:
    dist.init_process_group("gloo")
    groups = [dist.group.WORLD]
    if dist.get_world_size() == 4:  # ranks 0, 2 and 1, 3: ranks of a group are not those of the world
        mine = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
        groups.append(mine)
    check_planes(groups[-1], compiled=len(groups) == 1)  # two ranks compile it, four do not
    exchange.dist.all_to_all_single = counted
    for group in groups:
        check_rows(group)
        for stratified in (False, True):
            for separate in (False, True):
                check_objective(group, stratified=stratified, separate=separate)
    print(f"rank {dist.get_rank()} fetched")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end(0)
