"""Search for the largest batch that fits, and optionally the fastest layout: found by trying, and written as a recipe.

- all ranks that it is started on take part, and come to the same end
- a size is what a rank computes in one pass (data.micro_batch). "N/rank" batches grow with it; a global batch stays as
  it is, in as many passes as it takes, so sizes divide it
- the planner says where to begin, where it knows the device; what counts is what was tried
- each size is tried at most once, and the end is proven at both sides. Memory grows about evenly with the size, so two
  sizes that work tell where the limit is; where that is wrong, steps that double and then halve find it all the same"""

import bisect
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from vitrail import disk
from vitrail.bench.supervise import TOO_LARGE, Supervisor, Trial
from vitrail.errors import RunFailed, UserError
from vitrail.launch.world import World, connect, find_world
from vitrail.parallel.agree import on_chief
from vitrail.parallel.check import refuse
from vitrail.parallel.mesh import Layout
from vitrail.recipe import Recipe, load_recipe, yaml
from vitrail.recipe.load import find_recipe
from vitrail.recipe.yaml import Key, set_key, split_override

TRUSTED = 8  # trials in which the line through memory is followed; then the gap is halved
FARTHEST = 4  # times the largest size that has worked


class NothingFits(UserError):
    """Not even the smallest size works."""


@dataclass(frozen=True)
class Found:
    """The largest size that works and the next, which does not; None: there is none, or it was not asked for."""

    best: Trial
    next: Trial | None
    trials: tuple[Trial, ...]

    @property
    def size(self) -> int:
        return self.best.size

    @property
    def proof(self) -> str:
        """Say in one sentence why it is the largest."""
        works = f"{self.size} {'samples' if self.size > 1 else 'sample'} a rank and pass fit"
        if self.next is None:
            return f"{works}, and more were not asked for"
        return f"{works}, {self.next.size} do not ({self.next.verdict} on rank {self.next.rank})"


def search(
    attempt: Callable[[int], Trial],
    sizes: Sequence[int],
    *,
    guess: Callable[[Trial], int | None] = lambda trial: None,
    limit: float = 0.95,
    tell: Callable[[Trial], None] = lambda trial: None,
) -> Found:
    """Find the largest of the rising `sizes` that fits; `limit` is the share of memory that may be in use.

    The smallest comes first: it tells whether anything works, and `guess` what the planner says of that device. What
    fails for another reason than memory bounds the search, too, unless it is the smallest.
    """
    trials: dict[int, Trial] = {}
    low, high = -1, len(sizes)  # the largest place that works and the smallest that does not, as far as known
    place, planned = 0, None
    while low + 1 < high:
        trial = attempt(sizes[place])
        trials[place] = trial
        tell(trial)
        low, high = (place, high) if trial.fits else (low, place)
        if len(trials) == 1 and trial.fits and (size := guess(trial)) is not None:
            planned = _place(sizes, size)
        line = _meet(trials, limit) if len(trials) <= TRUSTED else None
        if line is not None and (high == len(sizes) or line < sizes[high]):  # else it has been proven wrong
            place = min(max(_place(sizes, line), low + 1), high - 1)
        elif planned is not None and low < planned < high:
            place = planned
        elif high == len(sizes):
            place = min(high - 1, 2 * low + 1)
        else:
            place = (low + high) // 2
    if low < 0:
        raise _refusal(trials[0])
    return Found(trials[low], trials.get(high), tuple(trials.values()))


def _place(sizes: Sequence[int], size: float) -> int:
    """Return the place of the largest size that is not above."""
    return max(0, bisect.bisect_right(sizes, size) - 1)


def _meet(trials: dict[int, Trial], limit: float) -> float | None:
    """Return the size at which the line through the two largest that work meets the limit of memory."""
    known = sorted((t.size, t.share) for t in trials.values() if t.fits and t.share is not None)
    if len(known) < 2:
        return None
    (a, low), (b, high) = known[-2:]
    slope = (high - low) / (b - a)
    return min(FARTHEST * b, b + (limit - high) / slope) if slope > 0 else FARTHEST * b


def _refusal(first: Trial) -> UserError:
    samples = f"{first.size} {'samples' if first.size > 1 else 'sample'} a rank"
    if first.verdict not in TOO_LARGE:
        sure = "" if first.verdict == "killed (signal 9)" else ", not for want of memory"
        return UserError(
            f"a trial with {samples} did not work on rank {first.rank} ({first.verdict}{sure}): {first.why}"
        )
    return NothingFits(
        f"data.batch: not even {samples} fit ({first.verdict} on rank {first.rank}: {first.why}); set "
        "parallel.recompute=full, shard over more ranks, or use a smaller model or data.crop"
    )


def tuned_tree(given: str, overrides: Sequence[str], out: Path) -> dict[str, Any]:
    """Return what extends the given file with all changes; the whole recipe where that would not mean the same.

    That of a run folder begins a run of its own: the old one goes on with its old batch.
    """
    whole = find_recipe(given, overrides)
    if Path(given).is_dir():
        name = f"{whole.run.name[:120]}-tuned"
        whole = whole.model_copy(update={"run": whole.run.model_copy(update={"name": name, "dir": None})})
    if Path(given).is_file():
        tree: dict[str, Any] = {"extends": os.path.relpath(Path(given).resolve(), out.resolve().parent)}
        cleared: set[Key] = set()
        try:
            for text in overrides:
                key, value = split_override(text)
                tree = set_key(tree, key, yaml.parse(value, text), cleared)
            if _load_beside(yaml.dump(tree), out) == whole:
                return tree
        except UserError:  # a change inside a list, say
            pass
    return whole.to_tree()


def _load_beside(text: str, out: Path) -> Recipe:
    """Read a recipe as it would be read from a file at `out`."""
    part = disk.write_whole(disk.draft_of(out), text, durable=False)
    try:
        return load_recipe(part)
    finally:
        disk.remove(part, inside=part.parent)


def write_tuned(out: Path, tree: dict[str, Any], found: Found, *, ranks: int) -> None:
    """Write the recipe, with what was found in its header."""
    best = found.best
    lines = [
        f"Found by `vitrail tune` on {ranks} x {best.device}: {found.proof}.",
        f"Peak of the fullest rank: {best.allocated_gib:.2f} GiB allocated, {best.reserved_gib:.2f} GiB reserved; "
        f"{best.share:.0%} of its memory was in use.",
    ]
    text = "".join(f"# {line}\n" for line in lines) + yaml.dump(tree)
    disk.publish(disk.write_whole(disk.draft_of(out), text), out)  # never over what came meanwhile


def check_out(out: Path) -> None:
    """Refuse a place that cannot be written to before anything is tried."""
    if os.path.lexists(out):
        raise UserError(f"--out: {out} exists; remove it, or give another file")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(f"--out: cannot write into {out.parent}; give another file")


MOST = 65536  # samples a rank that are tried at most, unless --most says otherwise


@dataclass(frozen=True)
class Sizes:
    """The sizes that a recipe can have, and what each of them means for it."""

    per_rank: bool  # the batch grows with the size
    share: int  # samples of a data-parallel rank, where they are fixed
    passes: int  # of a step, where the batch grows
    layout: Layout
    candidates: Sequence[int]

    def changes(self, size: int) -> list[str]:
        """Return the overrides for a size."""
        batch = [f"data.batch={size * self.passes}/rank"] if self.per_rank else []
        return [*batch, f"data.micro_batch={size}"]

    def rows(self, size: int) -> int:
        """Return the samples of a rank that a step of a trial computes: two passes tell what all of them need."""
        if self.per_rank:
            return size * self.passes
        return self.share if self.layout.pipeline > 1 else min(self.share, 2 * size)

    def batch(self, size: int) -> int:
        """Return the samples of a step over all ranks."""
        return (size * self.passes if self.per_rank else self.share) * self.layout.data


def sizes_of(recipe: Recipe, world: int, *, multiple: int = 1, most: int | None = None) -> Sizes:
    """Return multiples of a number up to the most; for a global batch those that divide a rank's share of it."""
    for name, value in (("--multiple", multiple), ("--most", most)):
        if value is not None and value < 1:
            raise UserError(f"{name}: {value} must be 1 or more")
    layout, data = refuse(recipe, world), recipe.data
    share = data.global_batch(layout.data) // layout.data
    if isinstance(data.batch, str):
        passes = -(-share // (data.micro_batch or share)) if layout.pipeline > 1 else 1  # a pipeline needs several
        found = Sizes(True, share, passes, layout, range(multiple, (most or MOST) + 1, multiple))
        what = f"--most {most or MOST}"
    else:
        numbers = [n for n in range(multiple, min(most or MOST, share) + 1, multiple) if share % n == 0]
        found = Sizes(False, share, 1, layout, numbers)
        if layout.pipeline > 1:
            found = replace(found, candidates=[n for n in numbers if _possible(recipe, found.changes(n), world)])
        what = f"the {share} samples that data.batch={data.batch} gives a rank"
    if not found.candidates:
        raise UserError(
            f"--multiple: no multiple of {multiple} is possible with {what}; give a smaller --multiple"
            + ("" if found.per_rank else ', or data.batch as "N/rank"')
        )
    return found


def _possible(recipe: Recipe, changes: Sequence[str], world: int) -> bool:
    try:
        refuse(load_recipe(recipe, changes), world)
    except UserError:
        return False
    return True


LAYOUTS = 4  # that are tried, of those that the planner ranks first


def tune(
    given: str,
    *,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    multiple: int = 1,
    most: int | None = None,
    head_room: float = 0.05,
    limit: float = 900.0,
    cluster: str | None = None,
    layouts: bool = False,
    plugins: Sequence[str] = (),
    trust: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Search on all ranks that this was started on; every rank returns the same, and the first writes the recipe."""
    if not 0 <= head_room < 1:
        raise UserError(f"--head-room: {head_room} must be a share of memory from 0 to below 1, such as 0.05")
    if limit <= 0:
        raise UserError(f"--trial-limit: {limit} must be above 0 seconds")
    world = find_world()
    recipe = find_recipe(given, overrides)
    out = out or Path(f"{Path(given).stem}-tuned.yaml")
    sizes_of(recipe, world.size, multiple=multiple, most=most)  # what is wrong is told before anybody waits
    results: list[tuple[float | None, Sequence[str], Sizes, Found]] = []
    refused: list[str] = []
    trials: list[dict[str, Any]] = []
    with supervisors(world) as store:
        on_chief(lambda: check_out(out), None)
        on_chief(lambda: check_cluster(cluster), None)
        choices: Sequence[Sequence[str]] = [()]
        if layouts:
            choices = on_chief(lambda: planned_layouts(recipe, world.size, cluster), None)
        supervisor = Supervisor(world, store, head_room, limit, plugins, trust)
        for choice in choices:
            layout = " ".join(choice)

            def told(trial: Trial, layout: str = layout) -> None:
                trials.append(asdict(trial) | {"layout": layout})
                tell(describe(trial))

            if choice:
                tell(f"layout {layout}")
            try:
                one = load_recipe(recipe, choice) if choice else recipe
                sizes = sizes_of(one, world.size, multiple=multiple, most=most)
                found = largest(one, sizes, supervisor, cluster, tell, told)
                seconds = whole_step(one, sizes, supervisor, found, told)
            except RunFailed:  # a rank is gone
                raise
            except UserError as error:
                if len(choices) == 1:
                    raise
                refused.append(f"{layout}: {error}")
                tell(refused[-1])
                continue
            if seconds is None:
                tell("the speed is not known, since whole steps take too long; a longer --trial-limit would tell it")
            speed = None if seconds is None else sizes.batch(found.size) / seconds
            results.append((speed, choice, sizes, found))
        if not results:
            raise NothingFits("data.batch: no layout works: " + "; ".join(refused))
        speed, choice, sizes, found = max(results, key=lambda result: result[0] or 0.0)
        changes = [*choice, *sizes.changes(found.size)]

        def write() -> None:
            tree = tuned_tree(given, [*overrides, *changes], out)
            write_tuned(out, tree, found, ranks=world.size)

        on_chief(write, None)
    return {
        "recipe": str(out),
        "changes": changes,
        "batch": sizes.batch(found.size),
        "batch_per_rank": sizes.batch(found.size) // sizes.layout.data,
        "micro_batch": found.size,
        "ranks": world.size,
        "layout": str(sizes.layout),
        "device": found.best.device,
        "samples_per_s": speed,
        "memory": {"allocated_gib": found.best.allocated_gib, "reserved_gib": found.best.reserved_gib},
        "proof": found.proof,
        "refused": refused,
        "trials": trials,
    }


def largest(
    recipe: Recipe,
    sizes: Sizes,
    supervisor: Supervisor,
    cluster: str | None,
    tell: Callable[[str], None],
    told: Callable[[Trial], None],
) -> Found:
    """Find the largest size of one layout."""
    room = supervisor.head_room

    def attempt(size: int) -> Trial:
        tree = load_recipe(recipe, sizes.changes(size)).to_tree()
        return supervisor.try_recipe(tree, size, rows=sizes.rows(size))

    def guess(trial: Trial) -> int | None:
        # One rank asks: others that come to another size would wait in another trial.
        size = on_chief(lambda: planned_size(recipe, sizes, cluster, device=trial.device, head_room=room), None)
        if size is not None:
            tell(f"the planner expects {size} a rank")
        return size

    return search(attempt, sizes.candidates, guess=guess, limit=1 - room, tell=told)


def whole_step(
    recipe: Recipe, sizes: Sizes, supervisor: Supervisor, found: Found, told: Callable[[Trial], None]
) -> float | None:
    """Return the seconds of a step with all its passes, None if they are too many to be tried.

    A trial that left some out charges too much of the optimizer to each.
    """
    best = found.best
    if sizes.rows(best.size) < sizes.share and not sizes.per_rank:
        tree = load_recipe(recipe, sizes.changes(best.size)).to_tree()
        best = supervisor.try_recipe(tree, best.size, rows=sizes.share, steps=2)
        told(best)
    if best.verdict == "too slow":
        return None
    if not best.fits:
        raise UserError(
            f"data.batch: {best.size} samples a rank and pass fit, but a step of all {sizes.share // best.size} passes "
            f"did not work on rank {best.rank} ({best.verdict}: {best.why}); set a smaller --most or "
            "data.batch"
        )
    return best.step_seconds


def describe(trial: Trial) -> str:
    """Say a trial in a line."""
    line = f"{trial.size} a rank: {trial.verdict}"
    if trial.reserved_gib is not None:
        line += f", {trial.reserved_gib:.2f} GiB reserved, {trial.share:.0%} of the memory in use"
        line += f", {trial.step_seconds:.3g} s a step"
    if trial.why:
        line += f" (rank {trial.rank}: {trial.why.splitlines()[0][:200]})"
    return f"{line}; {trial.seconds:.0f} s"


@contextlib.contextmanager
def supervisors(world: World) -> Iterator[Any]:
    """Give the store that the supervisors of all ranks share, who have a process group on the CPU."""
    import torch.distributed as dist

    store, _ = connect(world, "cpu", timeout=timedelta(minutes=40))
    try:
        yield store
        dist.barrier()  # the first rank may hold the store: it stays until all are done
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- what the planner says


def check_cluster(cluster: str | None) -> None:
    """Refuse a name that nobody knows before anything is tried."""
    from vitrail.cost.cluster import load_cluster

    if cluster is not None:
        load_cluster(cluster)


def planned_size(
    recipe: Recipe, sizes: Sizes, cluster: str | None, *, device: str | None, head_room: float
) -> int | None:
    """Return the largest size that fits by the planner's reckoning; None where it does not know device or data."""
    from vitrail.cost.cluster import known_cluster, load_cluster
    from vitrail.cost.plan import GIB, Shares, memory_for, settle

    place = known_cluster(device) if cluster is None else load_cluster(cluster)
    if place is None:
        return None
    limit = (1 - head_room) * place.device.memory_gib * GIB

    def needs(size: int) -> float:
        one = settle(load_recipe(recipe, sizes.changes(size)), place)
        return memory_for(one, place, sizes.layout, Shares.of(one, sizes.layout)).reserved(place.device)

    small = sizes.candidates[0]
    large = sizes.candidates[min(15, len(sizes.candidates) - 1)]
    with contextlib.suppress(Exception):  # it only says where to begin: no trouble of its own may end the search
        slope = (needs(large) - needs(small)) / max(1, large - small)
        fitting = small + (limit - needs(small)) / slope if slope > 0 else small  # memory grows evenly
        return max(small, int(min(fitting, sizes.candidates[-1])))
    return None


def planned_layouts(recipe: Recipe, world: int, cluster: str | None) -> list[tuple[str, ...]]:
    """Return overrides of the layouts that the planner ranks first."""
    from vitrail.cost.plan import plan

    if cluster is None:
        raise UserError("--layouts: the planner must know the machine; give --cluster NAME_OR_FILE")
    found: dict[tuple[str, ...], None] = {}
    for one in plan(recipe, cluster=cluster, gpus=world):
        found[tuple(change for change in one.changes if change.startswith("parallel."))] = None
    return list(found)[:LAYOUTS]
