"""What a server costs: streams of many clients through `bonsai-jax serve`, beside the same in an engine.

    python benchmarks/server.py -m synth:bonsai-8b:q4_k_m --clients 1,64,256 -p 128 -n 128 [--record]
    uv run python benchmarks/server.py -m demo --clients 16 --beside-llamacpp demo

Three processes: the server, as users start it; the clients (stream_client.py), who send their requests at
once, streamed, each a prompt of its own; and this one, whose Engine has the server's options. With
--beside-llamacpp a fourth has llama.cpp's server with a GGUF file and as many slots as there are clients.
Repetitions are interleaved, and the others wait meanwhile. A line for each number of clients, as JSON:

    tok_s            tokens of all answers, from the first request sent to the last token; the median
    engine_tok_s     the same for requests to the Engine, from the first submit to the last answer
    share            of the two, the medians': 0.9 is asked for on a GPU
    ttft_s, between_s   time to the first token, and from one event of a stream to the next: p50 and p99 over
                     all requests of all repetitions. Tokens that are drawn together come in one event
    cpu_us, engine_cpu_us   CPU time for each token, of the server's process and of this one; on a CPU with
                     the model's own work
    client_cpu       CPU time of the clients' process over the time: near 1 it is what was measured

and one for llama.cpp with its own tok_s, ttft_s and between_s, where `ratio` is ours over theirs. Prompts are
random tokens, answers do not end before their length, sampled with the command line's defaults. --record
appends the lines to benchmarks/results/<device>.jsonl.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share the device's memory

import bonsai_jax as bj
from bonsai_jax import compile_cache, machine
from bonsai_jax.measure import bench
from bonsai_jax.protocols.fields import MOST_LOGPROBS
from checkpoints.demo import demo_path

HERE = Path(__file__).parent
PATH = "/v1/completions"
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
BIASES = 32  # the command line's
TIME_S = 1800  # in which a server is ready
GPUS = "CUDA_VISIBLE_DEVICES"  # of two of them the server has the first, and the Engine the second
IDLE_S = 2.0  # a server that takes less than a tenth of a core for so long has nothing left to compile


class Place:
    """A server at an address, and its process."""

    def __init__(self, url: str, process: subprocess.Popen):
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port, self.process = int(port), process

    def cpu_s(self) -> float:
        """CPU time of the process so far, with all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_until_idle(self) -> None:
        """A server goes on compiling after it is ready: the programs of answers with constraints."""
        begun, before = time.monotonic(), self.cpu_s()
        while time.monotonic() - begun < TIME_S:
            time.sleep(IDLE_S)
            now = self.cpu_s()
            if now - before < IDLE_S / 10:
                return
            before = now
        raise RuntimeError(f"the server has not been idle within {TIME_S} s")


@contextlib.contextmanager
def started(command: list[str], ready: str) -> Iterator[Place]:
    """A server's process, once a line of its output begins with `ready`. Another line ends with its URL."""
    environment = os.environ | {GPUS: os.environ[GPUS].split(",")[0]} if GPUS in os.environ else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url, begun = "", time.monotonic()
            for line in process.stdout:
                if " at http://" in line:
                    url = line.split()[-1]
                if line.startswith(ready):
                    break
                assert time.monotonic() - begun < TIME_S, f"not ready after {TIME_S} s"
            if not url:
                raise RuntimeError(f"{' '.join(command)}: it ended before it was ready")
            yield Place(url, process)
        finally:
            process.terminate()
            process.wait(60)


def serve(o: argparse.Namespace) -> contextlib.AbstractContextManager[Place]:
    command = [sys.executable, "-m", "bonsai_jax", "serve", "-m", o.model, "--port", "0"]
    sizes = ["--batch-size", max(o.clients), "--ctx", o.prompt + o.new, "--logit-biases", BIASES]
    return started([*command, *map(str, sizes)], "ready")


def llamacpp(o: argparse.Namespace) -> contextlib.AbstractContextManager[Place]:
    path = str(demo_path()) if o.beside_llamacpp == "demo" else o.beside_llamacpp
    command = [sys.executable, __file__, "--llamacpp", path, "-p", o.prompt, "-n", o.new]
    return started([*map(str, command), "--clients", str(max(o.clients))], "ready")


def llamacpp_process(path: str, slots: int, context: int) -> None:
    """llama.cpp's server, until this process is ended."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx, params.port, params.verbosity = slots, slots * context, 0, 0
    threads = len(os.sched_getaffinity(0))
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(f"serving at {server.listening_address}\nready", flush=True)
    while True:
        time.sleep(1)


class Clients:
    """The clients' process."""

    def __init__(self, process: subprocess.Popen):
        self._process = process

    def run(self, place: Place, requests: list[list[int]], new: int) -> dict:
        """What stream_client.py says of these prompts."""
        same = SAMPLING | {"max_tokens": new, "ignore_eos": True, "stream": True}
        same |= {"stream_options": {"include_usage": True}, "cache_prompt": False}
        bodies = [{"prompt": ids, "seed": i, **same} for i, ids in enumerate(requests)]
        job = {"host": place.host, "port": place.port, "path": PATH, "bodies": bodies}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        assert line, "the clients' process failed"
        result = json.loads(line)
        assert result["tokens"] == [new] * len(requests), result["tokens"]
        return result


class InEngine:
    """The same requests without a server."""

    def __init__(self, engine: bj.Engine):
        self.engine = engine

    def run(self, requests: list[list[int]], new: int) -> tuple[float, float]:
        """Seconds of the clock, and of this process on CPUs."""
        began, cpu = time.perf_counter(), time.process_time()
        handles = [
            self.engine.submit(
                ids,
                bj.SamplingParams(**SAMPLING, seed=i, temperature_first=True),
                max_new_tokens=new,
                ignore_eos=True,
            )
            for i, ids in enumerate(requests)
        ]
        for handle in handles:
            handle.result()
        return time.perf_counter() - began, time.process_time() - cpu


def engine(o: argparse.Namespace) -> bj.Engine:
    """As the server's, with every program compiled."""
    if GPUS in os.environ:  # jax has not looked yet
        os.environ[GPUS] = os.environ[GPUS].split(",")[-1]
    compile_cache.use_programs()
    model = bj.load(o.model, bj.RunConfig(context=o.prompt + o.new, batch_size=max(o.clients)))
    made = bj.Engine(model, logprobs=MOST_LOGPROBS, logit_biases=BIASES)
    made.warmup()
    return made


def waits(results: list[dict]) -> dict[str, dict[str, float]]:
    """Quantiles of the waiting times of all requests."""
    streams = [times for result in results for times in result["times"]]
    gaps = np.concatenate([np.diff(times) for times in streams])
    seconds = {"ttft_s": [times[0] for times in streams], "between_s": gaps if len(gaps) else [0.0]}
    return {
        name: {"p50": float(np.quantile(values, 0.5)), "p99": float(np.quantile(values, 0.99))}
        for name, values in seconds.items()
    }


def measured(clients: int, o: argparse.Namespace, inside: InEngine, crowd: Clients, places: list[Place]):
    """Rows for one number of clients: of our server, and of llama.cpp's if there is one."""
    tokens, spent, cpus = clients * o.new, [], []
    served: list[list[dict]] = [[] for _ in places]
    for repetition in range(o.repetitions + 1):  # the first, which is short, is not counted
        rng = np.random.default_rng((clients, repetition))
        vocabulary = min(1000, inside.engine.model.config.vocab_size)
        requests = rng.integers(0, vocabulary, (clients, o.prompt)).tolist()
        new = o.new if repetition else min(4, o.new)
        for place, own in zip(places, served, strict=True):
            before = place.cpu_s()
            own.append(crowd.run(place, requests, new))
            if place is places[0]:
                cpus.append(place.cpu_s() - before)
        spent.append(inside.run(requests, new))
    speeds = [[tokens / result["seconds"] for result in own[1:]] for own in served]
    median = [statistics.median(some) for some in speeds]
    engine = [tokens / seconds for seconds, _ in spent[1:]]
    about = {"clients": clients, "prompt_tokens": o.prompt, "new_tokens": o.new}
    yield {
        "impl": "bonsai-jax", **about, "tok_s": median[0], "tok_s_all": speeds[0],
        "engine_tok_s": statistics.median(engine), "engine_tok_s_all": engine,
        "share": median[0] / statistics.median(engine),
        **waits(served[0][1:]),
        "cpu_us": statistics.median(cpus[1:]) / tokens * 1e6,
        "engine_cpu_us": statistics.median(cpu for _, cpu in spent[1:]) / tokens * 1e6,
        "client_cpu": max(result["cpu_s"] / result["seconds"] for result in served[0][1:]),
    }  # fmt: skip
    for own, speed, all_speeds in zip(served[1:], median[1:], speeds[1:], strict=True):
        waited = waits(own[1:])
        ratio = {"ratio": median[0] / speed}
        yield {"impl": "llama.cpp", **about, "tok_s": speed, "tok_s_all": all_speeds, **ratio, **waited}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--clients", type=numbers, default=[1, 64, 256])
    parser.add_argument("-p", "--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("-n", "--new", type=int, default=128, help="tokens of each answer")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--beside-llamacpp", metavar="GGUF", help="a file, or demo: the demo model's")
    parser.add_argument("--commit", help="for a checkout without history")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--llamacpp", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.llamacpp:
        llamacpp_process(o.llamacpp, max(o.clients), o.prompt + o.new)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    client = [sys.executable, str(HERE / "stream_client.py")]
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(serve(o))]  # first: it compiles what the Engine below finds compiled
        if o.beside_llamacpp:
            places.append(stack.enter_context(llamacpp(o)))
        clients = Clients(stack.enter_context(subprocess.Popen(client, **pipes)))
        inside = InEngine(stack.enter_context(engine(o)))
        places[0].wait_until_idle()
        for count in o.clients:
            for row in measured(count, o, inside, clients, places):
                line = json.dumps({**bench.origin(o.commit), "what": "server", "model": o.model, **row})
                print(line, flush=True)
                if o.record:
                    record(line)


def record(line: str) -> None:
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    with (folder / f"{machine.device_name().lower().replace(' ', '-')}.jsonl").open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
