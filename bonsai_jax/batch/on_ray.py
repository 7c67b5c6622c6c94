"""A batch on Ray: actors with an Engine each, on the GPUs of a cluster or the CPUs of its nodes.

    this process: lines in, answers out --a line--> the actor with the fewest under way: Engine
                                        <-its answer-

Files are read and written here, so a line is written once, whoever dies. An actor that dies is started again
by Ray; its lines go to the others meanwhile. Ray Data would write its own files, whole blocks at a time, so
a line's answer would wait for its block's, and nothing could be appended to what is there.
"""

import asyncio
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bonsai_jax as bj
from bonsai_jax.batch import lines as reading
from bonsai_jax.batch import objects
from bonsai_jax.batch.answers import Answers, Job
from bonsai_jax.batch.lines import Line, Needs
from bonsai_jax.batch.results import Results
from bonsai_jax.batch.run import AHEAD, Report, each
from bonsai_jax.config import RunConfig
from bonsai_jax.progress import Progress

TRIES = 3  # actors that may die of a line
RESTARTS = 8  # of an actor
PAUSE_S = 0.5  # between two questions whether an actor is back


@dataclasses.dataclass(frozen=True)
class Load:
    """How an actor loads its model: `bj.load` with `run`, over `tensor` GPUs."""

    run: RunConfig
    tensor: int = 1
    offline: bool = False
    compile_cache: bool = True


class Worker:
    """The actor."""

    def __init__(self, name: str, load: Load, job: Job, needs: Needs):
        import jax

        if not load.compile_cache:
            jax.config.update("jax_enable_compilation_cache", False)
        mesh = None if load.tensor == 1 else bj.make_mesh(1, load.tensor)
        self.answers = Answers(bj.load(name, load.run, mesh=mesh, offline=load.offline), job, needs)

    async def ready(self) -> str:
        """Who and where it is."""
        import ray

        from bonsai_jax import machine

        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}, {machine.device_name()}"

    async def answer(self, line: Line) -> dict[str, Any]:
        return await self.answers(line)


@dataclasses.dataclass(eq=False)
class Actor:
    """What this process knows of a Worker. under_way: lines that it has."""

    number: int
    handle: Any
    up: bool = False
    under_way: int = 0


class Actors:
    """Lines to answers, by actors."""

    def __init__(self, handles: list[Any], tell: Callable[[str], None]):
        self.actors = [Actor(number, handle) for number, handle in enumerate(handles)]
        self.tell, self.lost = tell, Exception()
        self.changed = asyncio.Event()
        self.watches = {asyncio.create_task(self._watch(actor)) for actor in self.actors}

    async def __call__(self, line: Line) -> dict[str, Any]:
        """Raises RuntimeError when no actor is left."""
        from ray.exceptions import RayActorError

        if isinstance(line.request, ValueError):
            return objects.failed(line, line.request)
        for _ in range(TRIES):
            actor = await self._free()
            actor.under_way += 1
            try:
                return await actor.handle.answer.remote(line)
            except RayActorError as error:
                self._down(actor, error)
            finally:
                actor.under_way -= 1
        return objects.failed(line, RuntimeError(f"{TRIES} actors died while they had this line"))

    async def _free(self) -> Actor:
        while True:
            up = [actor for actor in self.actors if actor.up]
            if up:
                return min(up, key=lambda actor: actor.under_way)
            if not self.actors:
                raise RuntimeError(f"no actor is left: {self.lost}")
            self.changed.clear()
            await self.changed.wait()

    def _down(self, actor: Actor, error: Exception) -> None:
        if actor.up:  # the first of its lines to find out
            actor.up = False
            self.tell(f"actor {actor.number} died; its lines go to others: {_first_line(error)}")
            self.watches.add(asyncio.create_task(self._watch(actor)))

    async def _watch(self, actor: Actor) -> None:
        """Until it has loaded its model, the first time or again."""
        from ray import exceptions

        while not actor.up:
            try:
                where = await actor.handle.ready.remote()
                actor.up = True
                self.tell(f"actor {actor.number}: {where}")
            except exceptions.ActorUnavailableError:
                await asyncio.sleep(PAUSE_S)
            except exceptions.RayActorError as error:  # for good
                self.actors.remove(actor)
                self.lost = error
                self.tell(f"actor {actor.number} is lost: {_first_line(error)}")
                break
        self.changed.set()


def run(
    load: Load,
    source: str | Path,
    output: str | Path,
    job: Job = Job(),
    *,
    address: str,
    workers: int | None = None,
    named: str | None = None,
    progress: Progress = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """`batch.run`, by actors of Ray.

    load      how actors load the model: `named`, or the one that the lines name
    address   of the cluster, as ray.init has it: "auto", "ray://host:10001", or "local", which starts one
    workers   actors; None: as many as GPUs allow, or without any one on each node
    tell      called with news of actors
    Raises ImportError without ray, ValueError for more workers than there are GPUs for, RuntimeError when all
    actors are lost, and what `batch.run` raises.
    """
    try:
        import ray
    except ImportError:
        raise ImportError('ray is not installed; pip install "bonsai-jax[ray]", or leave --ray out') from None
    source = Path(source)
    with Results(Path(output)) as results:
        needs = reading.needs(source, reading.read(source), results.done, one_model=named is None)
        if not needs.lines:
            return Report(done_before=len(results.done))
        name = (needs.model or "demo") if named is None else named
        ray.init(address=address, log_to_driver=False)
        try:
            resources = _resources(ray, load.tensor, workers)
            window = AHEAD * job.rows * len(resources)
            options = {"max_restarts": RESTARTS, "max_concurrency": window}
            made = ray.remote(Worker)
            handles = [made.options(**options, **own).remote(name, load, job, needs) for own in resources]

            async def all_lines() -> Report:
                actors = Actors(handles, tell)
                return await each(source, needs.lines, results, actors, window, progress)

            report = asyncio.run(all_lines())
            report.devices = load.tensor * len(resources)
            return report
        finally:
            ray.shutdown()


def _resources(ray: Any, tensor: int, workers: int | None) -> list[dict[str, float]]:
    """What each actor asks of the cluster."""
    there = ray.cluster_resources()
    gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 1))
    if not gpus:
        if tensor > 1:
            raise ValueError(f"{tensor} GPUs for each actor, and the cluster at this address has none")
        nodes = sum(node["Alive"] for node in ray.nodes())
        workers = nodes if workers is None else workers
        return [{"num_cpus": max(1, cpus // workers)}] * workers
    most = gpus // tensor
    workers = most if workers is None else workers
    if not 1 <= workers <= most:
        raise ValueError(
            f"{workers} actors of {tensor} GPUs each, and the cluster at this address has {gpus} GPUs: "
            f"ask for 1 to {most}"
        )
    return [{"num_gpus": tensor}] * workers


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
