"""A batch on Ray: actors with an Engine each, on the GPUs of a cluster or the CPUs of its nodes.

    this process: lines in, answers out --a line--> the actor with the fewest lines: Engine
                                        <-its answer-

This process reads and writes the files, so each answer is written once even if actors die. Ray restarts an
actor that dies; meanwhile its lines go to the others. Ray Data would write its own files in whole blocks, so
an answer would wait for its block, and nothing could be appended to an existing output.
"""

import asyncio
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bonsai_jax as bj
from bonsai_jax.batch import lines as reading
from bonsai_jax.batch.answers import Answers, Job
from bonsai_jax.batch.lines import Line, Needs
from bonsai_jax.batch.results import failed, opened
from bonsai_jax.batch.run import LINES_PER_ROW, Report, each
from bonsai_jax.config import RunConfig
from bonsai_jax.progress import Progress

TRIES = 3  # how many actors may die while they have a line, before it counts as failed
RESTARTS = 8  # of one actor
PAUSE_S = 0.5  # before asking again whether an actor is available


@dataclasses.dataclass(frozen=True)
class Load:
    """How an actor loads its model: `bj.load` with `run`, on `tensor` GPUs."""

    run: RunConfig
    tensor: int = 1
    offline: bool = False
    compile_cache: bool = True
    lora: Sequence[str] = ()


class Worker:
    """The class of the actors."""

    def __init__(self, name: str, load: Load, job: Job, needs: Needs):
        import jax

        if not load.compile_cache:
            jax.config.update("jax_enable_compilation_cache", False)
        mesh = None if load.tensor == 1 else bj.make_mesh(1, load.tensor)
        model = bj.load(name, load.run, mesh=mesh, offline=load.offline, lora=load.lora)
        self.answers = Answers(model, job, needs)

    async def ready(self) -> str:
        """Its process, node and device, once it has loaded the model."""
        import ray

        from bonsai_jax import machine

        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}, {machine.device_name()}"

    async def answer(self, line: Line) -> dict[str, Any]:
        return await self.answers(line)


@dataclasses.dataclass(eq=False)
class Actor:
    """This process's view of a Worker. lines: how many it is answering; up: its model is loaded."""

    number: int
    handle: Any
    up: bool = False
    lines: int = 0


class Actors:
    """Answers to lines, by actors."""

    def __init__(self, handles: list[Any], tell: Callable[[str], None]):
        self.actors = [Actor(number, handle) for number, handle in enumerate(handles)]
        self.tell, self.lost = tell, Exception()
        self.changed = asyncio.Event()
        self.watches = {asyncio.create_task(self._watch(actor)) for actor in self.actors}

    async def __call__(self, line: Line) -> dict[str, Any]:
        """Raises RuntimeError when no actor is left."""
        from ray.exceptions import RayActorError

        if isinstance(line.request, ValueError):
            return failed(line, line.request)
        for _ in range(TRIES):
            actor = await self._free()
            actor.lines += 1
            try:
                return await actor.handle.answer.remote(line)
            except RayActorError as error:
                self._down(actor, error)
            finally:
                actor.lines -= 1
        return failed(line, RuntimeError(f"{TRIES} actors died while they had this line"))

    async def _free(self) -> Actor:
        while True:
            up = [actor for actor in self.actors if actor.up]
            if up:
                return min(up, key=lambda actor: actor.lines)
            if not self.actors:
                raise RuntimeError(f"no actor is left: {self.lost}")
            self.changed.clear()
            await self.changed.wait()

    def _down(self, actor: Actor, error: Exception) -> None:
        if actor.up:  # the first of its lines that sees the error
            actor.up = False
            self.tell(f"actor {actor.number} died; its lines go to others: {_first_line(error)}")
            self.watches.add(asyncio.create_task(self._watch(actor)))

    async def _watch(self, actor: Actor) -> None:
        """Wait until the actor has loaded its model, the first time or after a restart."""
        from ray import exceptions

        while not actor.up:
            try:
                where = await actor.handle.ready.remote()
                actor.up = True
                self.tell(f"actor {actor.number}: {where}")
            except exceptions.ActorUnavailableError:
                await asyncio.sleep(PAUSE_S)
            except exceptions.RayActorError as error:  # it is not restarted any more
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
    """`batch.run` with Ray actors.

    load      how actors load the model, which is `named` or the one that the lines name
    address   of the cluster, as in ray.init: "auto", "ray://host:10001", or "local", which starts one
    workers   how many actors; None: as many as GPUs allow, or one on each node without GPUs
    tell      called with a text when an actor starts or dies
    Raises ImportError without ray, ValueError for more workers than the GPUs allow, RuntimeError when all
    actors are lost, and the errors of `batch.run`.
    """
    try:
        import ray
    except ImportError:
        raise ImportError('ray is not installed; pip install "bonsai-jax[ray]", or leave --ray out') from None
    with reading.opened(source) as lines, opened(output) as results:
        needs = reading.needs(lines, reading.read(lines), results.done, one_model=named is None)
        if not needs.lines:
            return Report(done_before=len(results.done))
        name = (needs.model or "demo") if named is None else named
        ray.init(address=address, log_to_driver=False)
        try:
            resources = _resources(ray, load.tensor, workers)
            window = LINES_PER_ROW * job.batch_size * len(resources)
            options = {"max_restarts": RESTARTS, "max_concurrency": window}
            made = ray.remote(Worker)
            handles = [made.options(**options, **own).remote(name, load, job, needs) for own in resources]

            async def all_lines() -> Report:
                actors = Actors(handles, tell)
                return await each(lines, needs.lines, results, actors, window, progress)

            report = asyncio.run(all_lines())
            report.devices = load.tensor * len(resources)
            return report
        finally:
            ray.shutdown()


def _resources(ray: Any, tensor: int, workers: int | None) -> list[dict[str, float]]:
    """The resources of the cluster that each actor requests."""
    cluster = ray.cluster_resources()
    gpus, cpus = int(cluster.get("GPU", 0)), int(cluster.get("CPU", 1))
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
