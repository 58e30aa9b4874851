"""Who of a run's processes has died: heartbeats in the process group's store, read by threads, at no cost to a step."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch.distributed as dist

from lit_llm.errors import RunStopped, UserError
from lit_llm.training.beats import FAILED, LEFT, LOST, RUNS, Beat, beats_store, is_alive

WAY_OUT = "the same command with --ckpt_path last goes on from the last checkpoint"
AGAIN = "start the command again"
QUIET_S = 600.0
"""How long a rank may hold the interpreter that has said so; see :meth:`PeerWatch.quiet`."""
_FAST_S = 0.1  # the period while an end is being told
_ACK_S = 3.0  # for the others to read it before the store ends with rank 0
_PATIENCE_S = 1.5  # how long the other ranks of a machine let the first one speak
_NAMED = 8  # ranks named in a line
_BROKEN = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused|aborted)|[Bb]roken pipe|NCCL|gloo|[Ss]ocket|[Ff]ailed to (recv|send)|"
    r"remote process exited"
)
_TIMED_OUT = re.compile(r"[Tt]imed? ?out")


class PeerWatch:
    """Knows which rank of a run has died, and ends this process when the others can't go on.

    Two daemon threads per rank. One puts a heartbeat (a counter, the step, host and process) into the store of the
    process group, every ``timeout`` / 10 but at most every second, over a connection of its own; rank 0 reads all
    beats with one request, the others read rank 0's beat and its verdict. The other thread judges, so that a store
    that no longer answers is noticed too. Only changes of the counter count: clocks are never compared.

    A rank that is silent for ``timeout`` is gone, whether it is dead, paused or cut off. The main thread may hang in a
    collective then; the judge says the line on stderr and ends the process with exit code 1. Where the collective
    fails at once (gloo), call :meth:`explain` with the error. A slow rank is not dead: its beat goes on. What holds the
    interpreter for long, so that no thread of it can beat, goes into :meth:`quiet`.

    Does nothing for one rank, without a process group, or with a store that is no TCP server.

    Args:
        timeout: seconds.
        way_out: what the line advises.

    Raises:
        UserError: the timeout is not positive.
    """

    def __init__(self, timeout: float = 60.0, way_out: str = WAY_OUT) -> None:
        if not timeout > 0:
            raise UserError(f"the timeout of PeerWatch is {timeout}; give seconds above 0, such as 60")
        self.timeout, self.way_out = float(timeout), way_out
        self._run: _Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy watches nothing."""
        return {"timeout": self.timeout, "way_out": self.way_out, "_run": None}

    def start(self, step: Callable[[], int], processes: Callable[[], Iterable[Any]] | None = None) -> None:
        """Begins to watch; every rank calls it, once the process group is there.

        Args:
            step: gives the optimizer step; called by another thread.
            processes: gives the ``subprocess.Popen`` of the ranks that this process has started, to be ended with it.
        """
        self.stop()
        store = beats_store()
        if store is not None:
            self._run = _Run(store, self.timeout, step, processes or list, self.way_out)

    def explain(self, error: BaseException) -> str | None:
        """Tells the other ranks of an error that ends this one, and says who has died if that is what the error is.

        Blocks until that is known: at once for a rank of rank 0's machine or one that has told why it failed, else for
        some missed beats. Call it in every rank that ends by an exception.

        Returns:
            A line; None where the error is this rank's own.
        """
        return None if self._run is None else self._run.explain(error)

    def attach_to(self, error: BaseException) -> None:
        """Makes :meth:`explain`'s line, as RunStopped, the cause of the error: the command line then says it alone."""
        line = self.explain(error)
        if line is not None and error.__cause__ is None:
            error.__cause__ = RunStopped(line)

    @contextmanager
    def quiet(self, seconds: float = QUIET_S) -> Iterator[None]:
        """Around what keeps all threads of this process from running, such as the profiler's writing.

        The others are told before, and wait ``seconds`` instead of the timeout if that is longer. A rank that dies
        meanwhile is still found after the timeout by rank 0 where both are on one machine, at once by all where rank 0
        dies (the store goes with it), else after ``seconds``.
        """
        run = self._run
        if run is None:
            yield
            return
        before = run.mine.silence
        run.announce(max(before, seconds))
        try:
            yield
        finally:
            run.announce(before)

    def stop(self) -> None:
        """Ends the watch; the others are told that this rank is done. Can be called twice."""
        run, self._run = self._run, None
        if run is not None:
            run.end()


class _Run:
    """One watched run of this rank."""

    def __init__(
        self,
        store: Any,
        timeout: float,
        step: Callable[[], int],
        processes: Callable[[], Iterable[Any]],
        way_out: str,
    ) -> None:
        self.way_out = way_out
        self.store, self.timeout, self.step, self.processes = store, timeout, step, processes
        self.period = min(1.0, timeout / 10)
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.mine = Beat.of_this_process(self.rank)
        self.others = [Beat(rank) for rank in (range(1, world) if self.rank == 0 else [0])]
        self.line: str | None = None  # who has died
        self.final = False  # whether all shall end by it now
        self.gone: set[int] = set()
        self.broken_at: float | None = None  # the store's end
        self.rounds, self.answered_at = 0, time.monotonic()
        self.alarm_at: float | None = None  # a collective has failed, here or elsewhere
        self.dead_at: dict[int, int] = {}  # rounds when a rank's process was first seen dead
        self.leaving = False  # the main thread is on its way out
        self.told = 0.0  # the silence that the others know of
        self._begun = False
        self._wake, self._ended = threading.Event(), threading.Event()
        quiet_lightnings_observer(list(processes()))
        self._threads = [
            threading.Thread(target=work, daemon=True, name=name)
            for name, work in (("peers-talk", self._talk), ("peers-judge", self._judge))
        ]
        for thread in self._threads:
            thread.start()

    # Talking

    def _talk(self) -> None:
        try:
            while True:
                last = self._ended.is_set()
                self._round()
                self.answered_at = time.monotonic()
                self.rounds += 1
                if last:
                    return
                self._wake.wait(_FAST_S if self._hurried else self.period)
                self._wake.clear()
        except Exception:  # the store is gone, and rank 0 with it; the judge says so
            self.broken_at = time.monotonic()

    @property
    def _hurried(self) -> bool:
        return self.alarm_at is not None or self.line is not None or self.leaving or not self._begun

    def _round(self) -> None:
        self.mine.count += 1
        self.mine.step = self._step()
        silence = self.mine.silence  # before what is sent: it may change meanwhile
        self.store.set(f"beat/{self.rank}", self.mine.encode())
        self.told = silence
        if self.rank == 0:
            if not self._begun:
                for key in ("verdict", *(f"beat/{one.rank}" for one in self.others)):
                    self.store.compare_set(key, "", "-")
                self._begun = True
            if self.line is not None:
                self.store.set("verdict", json.dumps([self.line, self.final]))
            values = self.store.multi_get([f"beat/{one.rank}" for one in self.others])
            for one, value in zip(self.others, values, strict=True):
                one.hear(value)
            return
        self._begun = self._begun or self.store.check(["verdict", "beat/0"])
        if not self._begun:  # a read would wait, and look like a store that is gone
            return
        verdict, beat = self.store.multi_get(["verdict", "beat/0"])
        self.others[0].hear(beat)
        if verdict != b"-":
            self.line, self.final = json.loads(verdict)
        if (verdict != b"-" or self.others[0].state == LEFT) and not self.mine.knows:
            self.mine.knows = True
            self._wake.set()

    def _step(self) -> int:
        with suppress(Exception):  # a Trainer that is being taken apart
            return int(self.step())
        return self.mine.step

    def _settle(self, seconds: float, done: Callable[[], bool]) -> None:
        """Lets the talk go on, fast, until something is so."""
        end = time.monotonic() + seconds
        while not done() and self.broken_at is None and time.monotonic() < end:
            if time.monotonic() - self.answered_at > 5 * self.period:
                return  # nobody answers
            self._wake.set()
            time.sleep(0.02)

    def announce(self, silence: float) -> None:
        """Tells the others how long this rank may be silent; it waits until they can know of a silence."""
        self.mine.silence = silence
        self._wake.set()
        if silence and not self.leaving:
            self._settle(_ACK_S, lambda: self.told == silence)

    def _say(self) -> None:
        """Makes sure that the others have heard this rank; rank 0 waits for them, as the store goes with it."""
        rounds = self.rounds
        self._settle(_ACK_S, lambda: self.rounds >= rounds + 2)
        if self.rank == 0:
            listening = [one for one in self.others if one.count and one.rank not in self.gone]
            self._settle(_ACK_S, lambda: all(one.knows or one.state not in (RUNS, LOST) for one in listening))

    def end(self) -> None:
        """Says that this rank is done, and ends both threads."""
        if self.mine.state == RUNS:
            self.mine.state, self.mine.text = LEFT, "done"
        if not self.leaving:
            self.leaving = True
            self._say()
        self._ended.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)  # one that waits for an answer ends with the process
        self.store = None

    # Judging

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(_FAST_S if self._hurried else self.period / 2):
            now = time.monotonic()
            # It was this process that was paused, or it says itself that it may be.
            if now - before > max(self.timeout / 4, 2 * self.period) or self.mine.silence:
                self.answered_at = now
                for one in self.others:
                    one.heard = now
            before = now
            self._decide(now)
            if self.final and not self.leaving:
                # A main thread that can still speak may do so.
                if self._ended.wait(min(2.0, self.timeout / 2)) or self.leaving:
                    continue
                self._exit()

    def _decide(self, now: float) -> None:
        if self.alarm_at is None and any(one.state in (LOST, FAILED) for one in (self.mine, *self.others)):
            self.alarm_at = now
        patience = self.timeout if self.alarm_at is None else min(self.timeout, 5 * self.period)
        gone = [one for one in self.others if self._is_gone(one, now, patience)]
        self.gone = {one.rank for one in gone}
        if self.line is None:  # the first one counts: ranks that have told it go, too
            if gone:
                self.line = self._line_of_the_gone(gone)
            elif self.rank == 0 and self.alarm_at is not None and now - self.alarm_at > patience + 1:
                self.line = self._line_of_the_living()
        silent_since = [one.heard for one in gone] if self.broken_at is None else [self.broken_at]
        if gone and now - min(silent_since) > self.timeout:
            self.final = True
            self._wake.set()

    def _is_gone(self, one: Beat, now: float, patience: float) -> bool:
        if one.state == LEFT:
            return False
        if self.rank and (self.broken_at is not None or now - self.answered_at > patience):
            return True
        if not one.active:  # not heard yet: a rank may begin late
            return False
        if one.state == FAILED:
            return True
        unheard = now - one.heard > patience
        if self.alarm_at is None and not unheard:
            return False
        dead = one.machine == self.mine.machine and not is_alive(one.pid)
        if dead and self.alarm_at is not None:  # it may have said more before
            return self.rounds >= self.dead_at.setdefault(one.rank, self.rounds) + 2
        return unheard and (dead or now - one.heard > one.silence)

    def _line_of_the_gone(self, gone: list[Beat]) -> str:
        failed = [one for one in gone if one.state == FAILED]
        if failed:
            return f"{failed[0]} failed: {failed[0].text}; {self.way_out}"
        what = "has died" if len(gone) == 1 else "have died"
        if self.alarm_at is None:
            what = f"{what[:-4]}not been heard of for {self.timeout:g} s (dead, paused or cut off)"
        # Our own step: a beat is up to a period old, and ranks are never a step apart.
        return f"{_names(gone)} {what} at step {self._step()}; {self.way_out}"

    def _line_of_the_living(self) -> str:
        """A collective has failed although all are there."""
        everyone = [self.mine, *(one for one in self.others if one.active)]
        if left := [one for one in self.others if one.state == LEFT]:
            return f"{_names(left)} left at step {left[0].step}, before the others ({left[0].text}); {self.way_out}"
        if mute := [one for one in self.others if one.silence and time.monotonic() - one.heard > 5 * self.period]:
            what = "has said nothing since it began to write" if len(mute) == 1 else "have said nothing since writing"
            return (
                f"{_names(mute)} {what} at step {mute[0].step}, and a connection broke ({self._why()}); {self.way_out}"
            )
        late = [one for one in everyone if one.step < max(other.step for other in everyone)]
        why = self._why()
        if not late:  # within a step: those who have not met the error never came to the exchange
            late = [one for one in everyone if one.state == RUNS]
        if late and _TIMED_OUT.search(why):
            verb = "lives but is" if len(late) == 1 else "live but are"
            where = f"at step {late[0].step}, where the others waited in vain at step {max(e.step for e in everyone)}"
            return f"{_names(late)} {verb} behind, {where} ({why}); {self.way_out}"
        return f"the ranks lost one another at step {self.mine.step}, though all of them live ({why}); {self.way_out}"

    def _why(self) -> str:
        return next((one.text for one in (self.mine, *self.others) if one.state == LOST), "")

    # Ending

    def explain(self, error: BaseException) -> str | None:
        if self.leaving:
            return self.line
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if not _is_of_a_collective(error):
            own = isinstance(error, Exception) and not isinstance(error, RunStopped)
            self.mine.state, self.mine.text = (FAILED if own else LEFT), what
            if self.rank == 0:
                self.line = (
                    self.line or f"{self.mine} {'failed' if own else 'has ended the run'}: {what}; {self.way_out}"
                )
            self.leaving = True
            self._say()
            return None
        self.mine.state, self.mine.text = LOST, " ".join(str(error).split())[:200]
        self.leaving = True
        give_up = time.monotonic() + min(self.timeout, 5 * self.period) + (2 if self.rank == 0 else 2 + _ACK_S)
        while self.line is None and time.monotonic() < give_up:
            self._wake.set()
            time.sleep(0.02)
        if self.line is None:
            self.line = (
                f"the connection to another rank broke at step {self.mine.step} ({self.mine.text}); {self.way_out}"
            )
        self._say()
        return self.line

    def _exit(self) -> NoReturn:
        self.leaving = True
        self._say()
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_PATIENCE_S)
        for process in self.processes():
            with suppress(OSError):
                process.send_signal(signal.SIGKILL)
        with suppress(Exception):
            sys.stdout.flush()
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"lit-llm: error: {self.line}\n".encode())
        os._exit(1)


def quiet_lightnings_observer(processes: list[Any]) -> None:
    """Takes the thread off that would kill this process, unsaid, within 5 s of a child's death."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer" and getattr(thread, "_child_processes", None) == processes:
            thread._child_processes = []  # type: ignore[attr-defined]


def _names(ranks: list[Beat]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(str(one) for one in ranks[:_NAMED]) + more


def _is_of_a_collective(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and not isinstance(error, RunStopped) and _BROKEN.search(str(error)):
            return True
        error = error.__cause__
    return False
