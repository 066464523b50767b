"""Several processes for real: four launchers, four workers, and what can happen to them."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jax_impl import processes
from jax_impl.checkpoint import Checkpoint
from jax_impl.make_tiny import make_checkpoint
from jax_impl.processes import ProcessError, Processes, ProcessOptions, find_processes
from jax_impl.watch_hub import Hub, Lines, WireError, encode, greeting, read_status
from jax_impl.watch_view import Limits, Peer, Status, View

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = 60.0  # seconds from an accident to everybody's message and end
SETTLED = 40  # steps of 50 ms: all launchers have met by then
pytestmark = pytest.mark.timeout(240)


def free_port():
    """A port that is free together with the one above it."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20000, 32000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for p in (port, port + 1):
                held.enter_context(socket.create_server(("127.0.0.1", p)))
            return port
    raise AssertionError("no free pair of ports")


class Four:
    """Four processes of `process_program`."""

    def __init__(self, where):
        self.where, self.port, self.launchers = where, free_port(), {}

    def start(self, mode, who=range(4), *, start=100.0, stall=45.0, python=sys.executable):
        for i in who:
            arguments = (self.where, self.port, 4, i, mode, start, stall)
            with open(self.where / f"out{i}", "w") as out, open(self.where / f"err{i}", "w") as err:
                self.launchers[i] = subprocess.Popen(
                    [python, "-m", "parity.process_program", *map(str, arguments)],
                    cwd=ROOT,
                    stdout=out,
                    stderr=err,
                )
        return self

    def until_step(self, step):
        deadline = time.monotonic() + 150
        while any(self.step(i) < step for i in self.launchers):
            codes = [p.poll() for p in self.launchers.values()]
            assert codes == [None] * len(codes), f"ended early: {codes}\n{self.err(0)}"
            assert time.monotonic() < deadline, "the processes do not get anywhere"
            time.sleep(0.1)
        return self

    def step(self, i):
        file = self.where / f"step{i}"
        return int(file.read_text()) if file.exists() else -1

    def worker(self, i):
        return int((self.where / f"pid{i}").read_text())

    def stop(self):
        (self.where / "stop").touch()
        return self

    def end(self, within=CONTRACT):
        """Exit statuses, all within so many seconds from now."""
        deadline = time.monotonic() + within
        return {
            i: p.wait(max(deadline - time.monotonic(), 0.01)) for i, p in self.launchers.items()
        }

    def err(self, i):
        return (self.where / f"err{i}").read_text()

    def out(self, i):
        return (self.where / f"out{i}").read_text()

    def no_worker_is_left(self):
        deadline = time.monotonic() + 20
        for file in self.where.glob("pid*"):
            while True:
                try:
                    os.kill(int(file.read_text()), 0)
                except ProcessLookupError:
                    break
                assert time.monotonic() < deadline, f"{file.name} still runs"
                time.sleep(0.1)


@pytest.fixture
def four(tmp_path):
    run = Four(tmp_path)
    yield run
    for launcher in run.launchers.values():
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()
    for file in tmp_path.glob("pid*"):  # a worker leads a process group of its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(file.read_text()), signal.SIGKILL)


def test_sums_over_four_processes_of_four_devices(four):
    assert four.start("sums").end(200) == dict.fromkeys(range(4), 0)
    expected = f"4 16 [120.0] {[float(i) for i in range(16)]}"
    assert [(four.where / f"result{i}").read_text() for i in range(4)] == [expected] * 4
    # process 0 alone prints, and nothing but what it was told to
    assert [four.out(i) for i in range(4)] == [expected + "\n", "", "", ""]
    assert "watchdog" not in four.err(0)


def test_every_process_reads_its_own_slices_only(four):
    make_checkpoint(four.where, preset="tp16", seed=0)
    stored = {n: s.nbytes for n, s in Checkpoint.open(four.where / "target").consumed.items()}
    stored = {n: 48 * 4 if n.endswith("A_log") else s for n, s in stored.items()}  # 128, 48 used
    assert four.start("load").end(200) == dict.fromkeys(range(4), 0), four.err(0)
    found = [json.loads((four.where / f"result{i}").read_text()) for i in range(4)]
    assert [f["here"] for f in found] == [[*range(4 * i, 4 * i + 4)] for i in range(4)]
    assert {f["devices"] for f in found} == {16}
    times = {n: sum(f["read"].get(n, 0) for f in found) / size for n, size in stored.items()}
    # what is cut is read by one process, each byte once; what all ranks hold whole by all four
    assert set(times.values()) == {1.0, 4.0}
    cut = {n for n, t in times.items() if t == 1.0}
    assert all(f["read"][n] * 4 == stored[n] for f in found for n in cut)
    assert sum(stored[n] for n in cut) > 0.9 * sum(stored.values())


@pytest.mark.slow
@pytest.mark.timeout(900)  # both compile the model for 16 devices
def test_generate_gives_the_same_in_four_processes_as_in_one(tmp_path):
    make_checkpoint(tmp_path, preset="tp16", seed=0)
    command = [sys.executable, "-m", "jax_impl", "generate", str(tmp_path / "target")]
    command += ["--prompt-ids", "5,17,101", "--steps", "4", "--tp", "16", "--compute", "float32"]
    four = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "4"]
    four += ["--local-devices", "4", "--json", str(tmp_path / "four.json")]
    started = [
        subprocess.Popen([*command, *four, "--process-id", str(i)], cwd=ROOT) for i in range(4)
    ]
    assert [p.wait() for p in started] == [0] * 4
    one = ["--local-devices", "16", "--json", str(tmp_path / "one.json")]
    subprocess.run([*command, *one], cwd=ROOT, check=True)
    found = {n: json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "four")}
    assert [found[n]["conditions"]["processes"] for n in ("one", "four")] == [1, 4]
    assert found["four"]["output_ids"] == found["one"]["output_ids"]


def test_a_worker_killed_in_the_middle(four):
    four.start("sums-on").until_step(3)
    os.kill(four.worker(2), signal.SIGKILL)
    statuses = four.end()
    assert all(statuses.values())
    for i in range(4):
        message = four.err(i)
        assert "k3 watchdog: process 2 of 4 (ranks 8-11, host " in message
        assert "died: killed by SIGKILL; last seen step " in message
        assert message.count(": waiting for sums") >= 4
        for j in range(4):
            assert f"  process {j} of 4 (ranks {4 * j}-{4 * j + 3}, host " in message
    four.no_worker_is_left()


def test_a_process_that_never_comes(four):
    four.start("plain", (0, 1, 3), start=4.0)
    assert four.end() == {0: 3, 1: 3, 3: 3}
    for i in (0, 1, 3):
        assert "process 2 of 4 (ranks 8-11) did not start within 4 s" in four.err(i)
        assert "  process 1 of 4 (ranks 4-7, host " in four.err(i)
        assert "waiting for tokens, for " in four.err(i)
    four.no_worker_is_left()


@pytest.mark.slow
def test_process_0_never_comes(four):
    four.start("plain", (1, 2), start=4.0)
    assert four.end() == {1: 3, 2: 3}
    for i in (1, 2):
        answer = f"did not answer at 127.0.0.1:{four.port + 1} within 4 s"
        assert f"process 0 of 4 (ranks 0-3) did not start: its launcher {answer}" in four.err(i)
        assert f"process {i} of 4 (ranks {4 * i}-{4 * i + 3}): step " in four.err(i)
    four.no_worker_is_left()


@pytest.mark.slow
def test_a_stopped_worker(four):
    four.start("plain").until_step(SETTLED)
    os.kill(four.worker(1), signal.SIGSTOP)
    assert four.end() == dict.fromkeys(range(4), 3)
    for i in range(4):
        assert "k3 watchdog: process 1 of 4 (ranks 4-7, host " in four.err(i)
        assert "has sent no heartbeat for " in four.err(i)
        assert "  process 3 of 4 (ranks 12-15, host " in four.err(i)
    four.no_worker_is_left()


def test_an_ordinary_error_is_the_cause_and_is_not_drowned(four):
    assert four.start("error").end(100) == {0: 3, 1: 2, 2: 3, 3: 3}
    error = "config.json: found 3, expected 4; correct it"
    assert four.err(1).startswith(f"program: {error}\n")
    for i in range(4):
        assert "k3 watchdog: process 1 of 4 (ranks 4-7, host " in four.err(i)
        assert f"ended with status 2 over ValueError: {error}; last seen step 3" in four.err(i)
        assert four.err(i).count("k3 watchdog") == 1


@pytest.mark.parametrize("index", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_launcher(four, index):
    four.start("plain").until_step(SETTLED)
    four.launchers[index].kill()
    statuses = four.end()
    assert statuses.pop(index) == -signal.SIGKILL
    assert set(statuses.values()) == {3}
    for i in statuses:
        assert f"the launcher of process {index} of 4 (ranks " in four.err(i)
        assert "is gone (connection " in four.err(i)
        assert ": waiting for tokens, for " in four.err(i)
    four.no_worker_is_left()  # also not the one whose launcher is gone


@pytest.mark.slow
def test_one_process_stays_behind(four):
    assert four.start("stall", stall=3.0).end(100) == dict.fromkeys(range(4), 3)
    for i in range(4):
        assert "k3 watchdog: process 2 of 4 (ranks 8-11, host " in four.err(i)
        assert "in step 3: waiting for tokens" in four.err(i)
        assert "step 4: waiting for tokens, for " in four.err(i)


def ends_all(four, number):
    """One launcher gets the signal, and all end."""
    four.launchers[1].send_signal(number)
    assert four.end() == {0: 3, 1: 128 + number, 2: 3, 3: 3}
    for i in range(4):
        assert "process 1 of 4 (ranks 4-7, host " in four.err(i)
        assert f"was ended: interrupted by {number.name}" in four.err(i)
    four.no_worker_is_left()


def test_interrupting_one_process_ends_all(four, hears_sigint):
    ends_all(four.start("plain").until_step(SETTLED), signal.SIGINT)


@pytest.mark.slow
def test_in_the_background_of_a_script_sigterm_ends_all(four, hears_sigint):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what such a shell does; handed on to programs
    four.start("plain").until_step(SETTLED)
    for launcher in four.launchers.values():
        launcher.send_signal(signal.SIGINT)
    four.until_step(four.step(1) + SETTLED)  # goes on
    ends_all(four, signal.SIGTERM)


def test_an_interrupt_before_the_processes_have_met_is_told_to_them(four, hears_sigint):
    four.start("plain", (1,)).until_step(1)
    four.launchers[1].send_signal(signal.SIGINT)
    time.sleep(0.5)  # it knows by now, and process 0 is not there yet
    met = View(4, Limits(100.0, 45.0))
    hub = Hub(("127.0.0.1", four.port + 1), met)
    hub.start()
    assert four.end() == {1: 130}
    hub.join(CONTRACT)
    assert met.peers[1].status.system == "interrupted by SIGINT"
    assert "process 1 of 4 (host " in four.err(1) and "interrupted by SIGINT" in four.err(1)


def test_strangers_at_the_port_do_no_harm_and_bad_results_are_no_accident(four):
    four.start("verdict").until_step(SETTLED)
    hub = ("127.0.0.1", four.port + 1)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 200_000, b'{"k3": 1}\n', b"[1]\n"):
        with socket.create_connection(hub, 10) as stranger, contextlib.suppress(OSError):
            stranger.sendall(garbage)
            assert stranger.recv(100) == b""
    for hello, answer in (
        (greeting(1, 4), "--process-id 1 is taken"),
        (greeting(1, 8), "found --num-processes 8, expected 4"),
        (greeting(4, 4), "found --process-id 4, expected 0..3"),
    ):
        with socket.create_connection(hub, 10) as stranger:
            stranger.sendall(encode(hello))
            assert answer in stranger.recv(1000).decode()
    assert four.stop().end() == dict.fromkeys(range(4), 1)
    assert [four.err(i) for i in range(4)] == [""] * 4
    assert [four.out(i) for i in range(4)] == ["stopped by request, first: True\n", "", "", ""]


def test_a_port_in_use(four):
    with socket.create_server(("127.0.0.1", four.port + 1)):
        assert four.start("plain", (0,)).end() == {0: 2}
    assert f"k3: port {four.port + 1} on this host" in four.err(0)
    assert "Choose another port in --coordinator" in four.err(0)


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (
            {"coordinator": "host:1234"},
            ["found --coordinator without --num-processes, --process-id"],
        ),
        ({"process_id": 0}, ["found --process-id without --coordinator, --num-processes"]),
        ({"num_processes": 1}, ["without --coordinator, --process-id; give all three, or none"]),
        (
            {"coordinator": "host", "num_processes": 4, "process_id": 4},
            ["--coordinator: found 'host', expected HOST:PORT", "--process-id: found 4, expected"],
        ),
        (
            {"coordinator": "host:65535", "num_processes": 0, "process_id": 0},
            ["port of 1..65534", "--num-processes: found 0, expected at least 1"],
        ),
        (
            {"coordinator": "h:1", "num_processes": 2, "process_id": -1, "start_timeout": 0.0},
            ["--process-id: found -1, expected 0..1", "--start-timeout: found 0.0"],
        ),
        ({"local_devices": 0}, ["--local-devices: found 0, expected more than 0"]),
        ({"stall_timeout": float("nan")}, ["--stall-timeout: found nan, expected more than 0"]),
    ],
)
def test_bad_options_are_listed_in_one_error(options, messages):
    with pytest.raises(ProcessError) as error:
        find_processes(ProcessOptions(**options), {})
    for message in messages:
        assert message in str(error.value)
    assert str(error.value).startswith("processes:\n  - ")


def test_which_processes_there_are():
    three = {"coordinator": "host:1234", "num_processes": 4, "process_id": 2}
    found = find_processes(ProcessOptions(**three), {})
    assert found == Processes("host:1234", 4, 2) and found.hub == ("host", 1235)
    ipv6 = find_processes(ProcessOptions(**three | {"coordinator": "[::1]:80"}), {})
    assert ipv6.hub == ("::1", 81)
    assert find_processes(ProcessOptions(), {}) is None
    assert find_processes(ProcessOptions(**three | {"num_processes": 1, "process_id": 0})) is None


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "gpu[007-010],other1",
}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[007-010],other1", "gpu007"),
        ("gpu[3,5-7]", "gpu3"),
        ("gpu[1-4]-ib,x", "gpu1-ib"),
        ("n1.cluster,n2", "n1.cluster"),
        ("alone", "alone"),
    ],
)
def test_processes_from_slurm(nodes, host):
    found = find_processes(ProcessOptions(), SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert (found.number, found.index) == (4, 3)
    name, port = found.coordinator.split(":")
    assert name == host and 61440 <= int(port) < 65535 and int(port) % 2 == 0


def test_slurm_and_options_together():
    port = find_processes(ProcessOptions(coordinator="h:5"), SLURM)
    assert port == Processes("h:5", 4, 3)
    # a batch script that starts no step is one process, and so is a step of one task
    script = {k: v for k, v in SLURM.items() if not k.startswith("SLURM_STEP")}
    assert find_processes(ProcessOptions(), script) is None
    assert find_processes(ProcessOptions(), SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    with pytest.raises(ProcessError, match="SLURM_PROCID: found 'x'"):
        find_processes(ProcessOptions(), SLURM | {"SLURM_PROCID": "x"})
    with pytest.raises(ProcessError, match=r"SLURM_STEP_NODELIST: found '\['"):
        find_processes(ProcessOptions(), SLURM | {"SLURM_STEP_NODELIST": "["})


def test_the_limit_for_joining_ends_with_it(monkeypatch):
    """Reading or making a checkpoint comes next and may take long without a word."""
    ours, theirs = os.pipe()
    monkeypatch.setattr(processes._State, "reporter", processes._Reporter(theirs))
    monkeypatch.setattr(processes, "_exchange_once", lambda: None)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)
    processes.join(Processes("localhost:1", 1, 0))
    joining, joined = Lines().feed(os.read(ours, 1 << 16))
    assert (joining["doing"], joining["allow"]) == ("joining the other processes", 120.0)
    assert (joined["doing"], joined["allow"], joined["step"]) == ("joined", 0.0, None)
    for end in (ours, theirs):
        os.close(end)


def view(*statuses, **limits):
    peers = {i: Peer("h", s, heard=100.0) for i, s in enumerate(statuses) if s is not None}
    return View(len(statuses), Limits(**{"start": 50.0, "stall": 45.0} | limits), 4, peers)


AT = Status(step=5, doing="waiting for tokens", unchanged=1.0)


def changed(**fields):
    return dataclasses.replace(AT, **fields)


@pytest.mark.parametrize(
    ("statuses", "causes"),
    [
        ((AT, AT), []),
        ((AT, changed(status=0)), []),
        ((AT, changed(status=1, finished=True)), []),
        ((AT, changed(status=-9)), [1]),
        # a death before its consequences, in whatever order they are seen
        ((changed(status=1, error="x"), changed(status=-9), changed(status=-6)), [1]),
        ((changed(status=1, error="x"), changed(silent=7.0)), [1]),
        ((AT, changed(silent=7.0)), []),
        ((AT, changed(silent=21.0)), [1]),
        ((AT, changed(silent=7.0, system="stopped")), [1]),
        # standing still: the last one counts, and only when nobody beside it moves
        ((changed(step=6, unchanged=60.0), changed(unchanged=60.0)), [1]),
        ((changed(step=6, unchanged=60.0), changed(unchanged=40.0)), []),
        ((changed(unchanged=60.0), changed(unchanged=50.0)), [0, 1]),
        ((changed(unchanged=60.0), changed(unchanged=60.0, allow=100.0)), []),
        ((changed(step=None, unchanged=60.0), changed(step=None, unchanged=60.0)), []),
        ((changed(step=None, unchanged=2000.0), changed(unchanged=60.0)), [0]),
        ((changed(status=0), changed(unchanged=60.0)), [1]),
        ((changed(finished=True, unchanged=600.0), changed(status=0)), []),
        ((AT, None), [1]),
    ],
)
def test_who_is_to_blame(statuses, causes):
    judged = view(*statuses)
    troubles = judged.troubles(101.0)
    first = min((t.order for t in troubles), default=None)
    assert sorted({t.index for t in troubles if t.order == first}) == causes
    if causes:
        text = judged.verdict(troubles)
        assert all(f"process {i} of {len(statuses)} (ranks " in text for i in causes)
        assert "All processes are ended. " in text


def test_an_error_of_all_is_one_line():
    wrong = changed(status=2, error="ConfigError: tp 8: 16 devices found")
    judged = view(wrong, dataclasses.replace(wrong, unchanged=3.0))
    text = (
        "k3 watchdog: all 2 processes ended with status 2 over ConfigError: tp 8: 16 devices found"
    )
    assert judged.verdict(judged.troubles(101.0)) == text


def test_nobody_is_missed_before_the_start_timeout():
    judged = view(AT, None)
    assert judged.troubles(49.0) == []
    assert [t.index for t in judged.troubles(51.0)] == [1]


def test_a_launcher_that_falls_silent_or_is_lost():
    judged = view(AT, AT)
    judged.peers[1].heard = 80.0
    (trouble,) = judged.troubles(101.0)
    assert "nothing heard of process 1 of 2 (ranks 4-7, host h), launcher and" in trouble.what
    judged = view(AT, AT)
    judged.peers[0].lost = True
    (trouble,) = judged.troubles(101.0)
    assert "the launcher of process 0 of 2 (ranks 0-3, host h) is gone" in trouble.what


def test_lines_and_statuses_are_checked():
    lines = Lines()
    assert lines.feed(b'{"a": 1}\n{"b"') == [{"a": 1}]
    assert lines.feed(b": 2}\n") == [{"b": 2}]
    for bad in (b"x\n", b"[]\n", b"a" * 100_000):
        with pytest.raises(WireError):
            Lines().feed(bad)
    good = dataclasses.asdict(AT)
    assert read_status(good | {"ranks": [0, 3]}) == changed(ranks=(0, 3))
    for bad in ({"step": "5"}, {"ranks": [1]}, {"ranks": ["a", "b"]}, {"more": 1}, {"doing": None}):
        with pytest.raises(WireError):
            read_status(good | bad)
