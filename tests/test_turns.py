"""Turns: any number share, one is alone, whoever asks to be alone is not kept waiting for ever."""

import threading
import time

import pytest

from kvbook.turns import Stopped, Turns


class Worker(threading.Thread):
    """Takes one turn in a thread, and keeps it until told to go."""

    def __init__(self, turns: Turns, alone: bool) -> None:
        super().__init__(daemon=True)
        self.turns, self.alone = turns, alone
        self.has, self.go, self.stopped = threading.Event(), threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with self.turns.place() as turn:
                turn.take(self.alone)
                self.has.set()
                self.go.wait(20)
        except Stopped:
            self.stopped.set()

    def got_it(self) -> bool:
        return self.has.wait(5)

    def waits(self) -> bool:
        return not self.has.wait(0.2)

    def end(self) -> None:
        self.go.set()
        self.join(5)


def test_two_share():
    turns = Turns()
    first, second = Worker(turns, alone=False), Worker(turns, alone=False)
    assert first.got_it()
    assert second.got_it()
    first.end()
    second.end()


def test_one_who_is_alone_waits_for_those_who_share_and_keeps_all_others_out():
    turns = Turns()
    sharing = Worker(turns, alone=False)
    assert sharing.got_it()
    alone = Worker(turns, alone=True)
    assert alone.waits()
    sharing.end()
    assert alone.got_it()
    others = [Worker(turns, alone=True), Worker(turns, alone=False)]
    assert all(other.waits() for other in others)
    alone.end()
    for other in others:
        assert other.got_it()
        other.end()


def test_whoever_asks_to_be_alone_goes_before_those_who_ask_later():
    turns = Turns()
    sharing = Worker(turns, alone=False)
    assert sharing.got_it()
    alone = Worker(turns, alone=True)
    assert alone.waits()
    late = Worker(turns, alone=False)
    assert late.waits()
    sharing.end()
    assert alone.got_it()
    assert late.waits()
    alone.end()
    assert late.got_it()
    late.end()


def test_another_turn_gives_back_the_one_that_is_held():
    turns = Turns()
    with turns.place() as turn:
        for alone in (False, True, True, False):
            turn.take(alone)
    after = Worker(turns, alone=True)
    assert after.got_it()
    after.end()


def test_a_place_that_ends_by_an_error_keeps_no_turn():
    turns = Turns()

    def fail() -> None:
        with turns.place() as turn:
            turn.take(alone=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    after = Worker(turns, alone=False)
    assert after.got_it()
    after.end()


def test_after_a_stop_nobody_gets_a_turn_and_nobody_waits():
    turns = Turns()
    holder = Worker(turns, alone=True)
    assert holder.got_it()
    waiting = [Worker(turns, alone=False), Worker(turns, alone=True)]
    time.sleep(0.1)
    turns.stop()
    assert all(worker.stopped.wait(5) for worker in waiting)
    holder.end()
    with turns.place() as turn, pytest.raises(Stopped):
        turn.take(alone=False)
