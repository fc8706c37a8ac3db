"""Turns on one machine: so many at a time, or one alone.

Chapters are executed side by side; a cell that measures time must have the machine to itself.  Whoever waits to be alone
waits until nobody is left who could begin in the meantime: were the others stopped for each of them, cores would idle while
the last cell ends.  Then all who wait to be alone go one after the other, and only behind them whoever goes on.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Literal

Asked = Literal["begin", "alone", "go on"]


class Stopped(Exception):
    """No more turns are given: the work as a whole was ended."""


class Turn:
    """One holder's place; it holds at most one turn at a time.

    Parameters
    ----------
    turns : Turns
        From :meth:`Turns.place`, which gives the last turn back.
    """

    def __init__(self, turns: "Turns") -> None:
        self._turns = turns
        self._held: Asked | None = None

    def begin(self, queued: threading.Event | None = None) -> None:
        """Wait for a first turn, among others.

        Parameters
        ----------
        queued
            Set once nobody who asks later can be before this one.

        Raises
        ------
        Stopped
            After :meth:`Turns.stop`.
        """
        self._change("begin", queued)

    def take(self, alone: bool) -> None:
        """Go on with a turn of this kind; one among others that is held already is kept.

        Parameters
        ----------
        alone
            Whether nobody else may hold one meanwhile.

        Raises
        ------
        Stopped
            After :meth:`Turns.stop`.
        """
        if alone or self._held in (None, "alone"):
            self._change("alone" if alone else "go on")
        elif self._turns.stopped:
            raise Stopped

    def _change(self, asked: Asked, queued: threading.Event | None = None) -> None:
        self.give_back()
        self._turns._begin(asked, queued)
        self._held = asked

    def give_back(self) -> None:
        """End the turn, if one is held."""
        if self._held is not None:
            self._turns._end(self._held)
            self._held = None


class Turns:
    """Who may work now.

    Parameters
    ----------
    places : int
        How many may hold a turn that is not alone.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._changed = threading.Condition()
        self._held: Counter[Asked] = Counter()
        # Of each kind whoever asked first goes first.
        self._waiting: dict[Asked, list[object]] = {"begin": [], "alone": [], "go on": []}
        self.stopped = False

    @contextlib.contextmanager
    def place(self) -> Iterator[Turn]:
        """Give a place, to take turns from; its last turn ends with it."""
        turn = Turn(self)
        try:
            yield turn
        finally:
            turn.give_back()

    def stop(self) -> None:
        """Give no more turns: whoever waits or asks gets `Stopped`."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def _begin(self, asked: Asked, queued: threading.Event | None) -> None:
        with self._changed:
            queue, ticket = self._waiting[asked], object()
            queue.append(ticket)
            if queued is not None:
                queued.set()
            try:
                self._changed.wait_for(lambda: self.stopped or (queue[0] is ticket and self._is_free(asked)))
            finally:
                queue.remove(ticket)
                # Whoever waited behind this one may be able to go.
                self._changed.notify_all()
            if self.stopped:
                raise Stopped
            self._held[asked] += 1

    def _is_free(self, asked: Asked) -> bool:
        sharing = self._held["begin"] + self._held["go on"]
        if self._held["alone"]:
            return False
        if asked == "alone":
            return not sharing and not self._waiting["begin"]
        return sharing < self._places and (asked == "begin" or not self._waiting["alone"])

    def _end(self, held: Asked) -> None:
        with self._changed:
            self._held[held] -= 1
            self._changed.notify_all()
