"""Models in several processes, forks, and Ctrl-C."""

import copy
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import bonsai_jax as bj

ROOT = Path(__file__).parents[2]
TINY = "synth:tiny-llama:q8_0"
GREEDY = bj.SamplingParams(temperature=0.0)


def python(script: str, *arguments, timeout: float = 120) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)


def test_a_model_is_pickled_for_another_process(tmp_path):
    model = bj.load(TINY, bj.RunConfig(page_size=16))
    (tmp_path / "model").write_bytes(pickle.dumps(model))
    options = "max_new_tokens=5, sampling=bj.SamplingParams(temperature=0.0), ignore_eos=True"
    done = python(
        "import pickle, sys, bonsai_jax as bj\n"
        "model = pickle.load(open(sys.argv[1], 'rb'))\n"
        f"print(bj.generate(model, 'Once upon', {options})[0].tokens)",
        tmp_path / "model",
    )
    here = bj.generate(copy.deepcopy(model), "Once upon", max_new_tokens=5, sampling=GREEDY, ignore_eos=True)
    assert done.stdout.strip() == str(here[0].tokens), done.stderr


FORKED = """
import os, sys, bonsai_jax as bj
model = bj.load("synth:tiny-llama:q8_0")
engine = bj.Engine(model)
handle = engine.submit("One", max_new_tokens=2)
handle.result(100)
uses = [lambda: bj.generate(model, "One"), lambda: next(bj.stream(model, "One")),
        lambda: bj.logits(model, [1]), lambda: engine.submit("One"), lambda: handle.result(),
        lambda: bj.Engine(model),
        lambda: bj.load("synth:tiny-llama:q8_0"), lambda: bj.new_cache(model, 1, 8),
        lambda: bj.forward(model.params, [[1]], [1], model.config)]
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for use in uses:
    try:
        use()
    except RuntimeError as error:
        assert "was forked from one that uses bonsai_jax" in str(error), error
    else:
        raise AssertionError
engine.close()
print("all said", flush=True)
os._exit(0)  # as multiprocessing ends a child
"""


def test_a_forked_process_says_that_it_is_one():
    """It waited for threads that it does not have."""
    done = python(FORKED)
    assert (done.returncode, done.stdout.strip()) == (0, "all said"), done.stderr


def test_ctrl_c_while_the_command_line_is_imported_ends_it_in_silence(tmp_path):
    (tmp_path / "typer.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "bonsai_jax", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert process.stdout is not None and process.stdout.read(9) == b"importing"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (130, b"")


READING = """
import os, signal, threading, time, jax, bonsai_jax as bj
from bonsai_jax.engine import loop
model, reading, sent = bj.load("synth:tiny-llama:q8_0"), threading.Event(), []

def slow(logits, state):
    return jax.lax.fori_loop(0, 10**8, lambda i, x: jax.numpy.sin(x), logits)

def interrupt():
    reading.wait()
    time.sleep(1)
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)

read = loop.Loop._read
loop.Loop._read = lambda self, flight: (reading.set(), read(self, flight))
threading.Thread(target=interrupt, daemon=True).start()
try:
    bj.generate(model, [1, 2, 3], max_new_tokens=2, logits_processor=slow)
except KeyboardInterrupt:
    print(time.perf_counter() - sent[0], flush=True)
    os._exit(0)
"""


def test_ctrl_c_while_a_prompt_is_read_ends_the_wait():
    """Here one chunk takes minutes."""
    done = python(READING)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1
