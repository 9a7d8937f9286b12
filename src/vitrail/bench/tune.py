"""The largest batch that fits, and optionally the fastest layout: found by trying, and written as a recipe.

- all ranks that it is started on take part, and come to the same end
- the planner says where to begin, where it knows the device; what counts is what was tried
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from vitrail.bench.largest import Found, NothingFits, search
from vitrail.bench.sizes import Sizes, sizes_of
from vitrail.bench.supervise import Supervisor, Trial
from vitrail.bench.tuned import check_out, tuned_tree, write_tuned
from vitrail.errors import RunFailed, UserError
from vitrail.launch.world import World, connect, find_world
from vitrail.recipe import Recipe, load_recipe
from vitrail.recipe.find import find_recipe
from vitrail.training.collective import on_chief

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
    """The largest size of one layout."""
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
    """Seconds of a step with all its passes, None if they are too many to be tried.

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
    """A trial in a line."""
    line = f"{trial.size} a rank: {trial.verdict}"
    if trial.reserved_gib is not None:
        line += f", {trial.reserved_gib:.2f} GiB reserved, {trial.share:.0%} of the memory in use"
        line += f", {trial.step_seconds:.3g} s a step"
    if trial.why:
        line += f" (rank {trial.rank}: {trial.why.splitlines()[0][:200]})"
    return f"{line}; {trial.seconds:.0f} s"


@contextlib.contextmanager
def supervisors(world: World) -> Iterator[Any]:
    """The store that the supervisors of all ranks share; they have a process group on the CPU."""
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
    """The largest size that fits by the planner's reckoning; None where it does not know the device or the data."""
    from vitrail.cost.cluster import list_clusters, load_cluster
    from vitrail.cost.plan import GIB, Shares, memory_for, settle

    if cluster is not None:
        place = load_cluster(cluster)
    else:
        known = (load_cluster(name) for name in list_clusters())
        alike = next((one for one in known if one.device.name == device), None)
        if alike is None:
            return None
        place = alike
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
    """Overrides of the layouts that the planner ranks first."""
    from vitrail.cost.plan import plan

    if cluster is None:
        raise UserError("--layouts: the planner must know the machine; give --cluster NAME_OR_FILE")
    found: dict[tuple[str, ...], None] = {}
    for one in plan(recipe, cluster=cluster, gpus=world):
        found[tuple(change for change in one.changes if change.startswith("parallel."))] = None
    return list(found)[:LAYOUTS]
