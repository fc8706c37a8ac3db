"""Turns: so many share, one is alone, and nobody is kept waiting for ever."""

import threading
import time

import pytest

from kvreport.running.exclusive import Stopped, Turns


class Worker(threading.Thread):
    """Takes some turns in a thread, one after the other, and keeps each until told to go on."""

    def __init__(self, turns: Turns, *asked: str) -> None:
        super().__init__(daemon=True)
        self.turns, self.asked, self.has, self.go = turns, list(asked), threading.Semaphore(0), threading.Semaphore(0)
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with self.turns.place() as turn:
                for asked in self.asked:
                    if asked == "begin":
                        turn.begin()
                    else:
                        turn.take(alone=asked == "alone")
                    self.has.release()
                    self.go.acquire(timeout=20)
        except Stopped:
            self.stopped.set()

    def got_it(self) -> bool:
        return self.has.acquire(timeout=5)

    def waits(self) -> bool:
        return not self.has.acquire(timeout=0.2)

    def go_on(self) -> None:
        self.go.release()

    def end(self) -> None:
        self.go.release()
        self.join(5)


def test_as_many_share_as_there_are_places_and_the_others_begin_in_the_order_in_which_they_came():
    turns = Turns(2)
    first, second = Worker(turns, "begin"), Worker(turns, "begin")
    assert first.got_it()
    assert second.got_it()
    third = Worker(turns, "begin")
    assert third.waits()
    fourth = Worker(turns, "begin")
    assert fourth.waits()
    first.end()
    assert third.got_it()
    assert fourth.waits()
    for worker in (second, third, fourth):
        worker.end()


def test_one_who_is_alone_waits_for_those_who_share_and_keeps_all_others_out():
    turns = Turns(2)
    sharing = Worker(turns, "begin")
    assert sharing.got_it()
    alone = Worker(turns, "alone")
    assert alone.waits()
    sharing.end()
    assert alone.got_it()
    others = [Worker(turns, "alone"), Worker(turns, "begin")]
    assert all(other.waits() for other in others)
    alone.end()
    for other in reversed(others):
        assert other.got_it()
        other.end()


def test_whoever_waits_to_be_alone_makes_room_for_those_who_have_not_begun():
    turns = Turns(2)
    one, two = Worker(turns, "begin", "alone"), Worker(turns, "begin")
    assert one.got_it()
    assert two.got_it()
    late = Worker(turns, "begin")
    assert late.waits()
    one.go_on()
    assert late.got_it()
    assert one.waits()
    two.end()
    assert one.waits()
    late.end()
    assert one.got_it()
    one.end()


def test_all_who_wait_to_be_alone_go_before_whoever_goes_on():
    turns = Turns(2)
    one, two = Worker(turns, "begin", "alone", "go on"), Worker(turns, "begin", "alone")
    assert one.got_it()
    assert two.got_it()
    one.go_on()
    assert one.waits()
    two.go_on()
    assert one.got_it()
    assert two.waits()
    one.go_on()
    assert two.got_it()
    assert one.waits()
    two.end()
    assert one.got_it()
    one.end()


def test_who_goes_on_among_others_keeps_the_turn():
    turns = Turns(1)
    worker = Worker(turns, "begin", "go on", "go on")
    waiting = Worker(turns, "begin")
    for _ in range(3):
        assert worker.got_it()
        assert waiting.waits()
        worker.go_on()
    assert waiting.got_it()
    waiting.end()


def test_another_turn_gives_back_the_one_that_is_held():
    turns = Turns(1)
    with turns.place() as turn:
        turn.begin()
        for alone in (False, True, True, False):
            turn.take(alone)
    after = Worker(turns, "alone")
    assert after.got_it()
    after.end()


def test_a_place_that_ends_by_an_error_keeps_no_turn():
    turns = Turns(1)

    def fail() -> None:
        with turns.place() as turn:
            turn.take(alone=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    after = Worker(turns, "begin")
    assert after.got_it()
    after.end()


def test_after_a_stop_nobody_gets_a_turn_and_nobody_waits():
    turns = Turns(2)
    holder = Worker(turns, "alone")
    assert holder.got_it()
    waiting = [Worker(turns, "begin"), Worker(turns, "alone"), Worker(turns, "go on")]
    time.sleep(0.1)
    turns.stop()
    assert all(worker.stopped.wait(5) for worker in waiting)
    holder.end()
    with turns.place() as turn, pytest.raises(Stopped):
        turn.take(alone=False)
    with turns.place() as turn, pytest.raises(Stopped):
        turn.begin()


def test_a_stop_ends_the_turn_of_whoever_would_have_kept_it():
    turns = Turns(1)
    with turns.place() as turn:
        turn.begin()
        turns.stop()
        with pytest.raises(Stopped):
            turn.take(alone=False)
