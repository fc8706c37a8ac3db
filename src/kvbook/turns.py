"""Turns on one machine: any number at a time, or one alone.

Chapters are executed side by side; a cell that measures time must have the machine to itself. A readers-writer lock of the
usual kind: who asks to be alone goes before whoever asks later to share, or it might wait for ever.
"""

import contextlib
import threading
from collections.abc import Iterator


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
        self._held: bool | None = None

    def take(self, alone: bool) -> None:
        """Give back the turn that is held and wait for another one.

        Parameters
        ----------
        alone
            Whether nobody else may hold one meanwhile.

        Raises
        ------
        Stopped
            After :meth:`Turns.stop`.
        """
        self.give_back()
        self._turns._begin(alone)
        self._held = alone

    def give_back(self) -> None:
        """End the turn, if one is held."""
        if self._held is not None:
            self._turns._end(self._held)
            self._held = None


class Turns:
    """Who may work now."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = 0
        self._one_alone = False
        self._waiting_to_be_alone = 0
        self._stopped = False

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
            self._stopped = True
            self._changed.notify_all()

    def _begin(self, alone: bool) -> None:
        with self._changed:
            self._waiting_to_be_alone += alone
            try:
                self._changed.wait_for(lambda: self._stopped or self._is_free(alone))
            finally:
                self._waiting_to_be_alone -= alone
            if self._stopped:
                # Who waited behind this one may be able to go on.
                self._changed.notify_all()
                raise Stopped
            if alone:
                self._one_alone = True
            else:
                self._sharing += 1

    def _is_free(self, alone: bool) -> bool:
        if alone:
            return not self._one_alone and not self._sharing
        return not self._one_alone and not self._waiting_to_be_alone

    def _end(self, alone: bool) -> None:
        with self._changed:
            if alone:
                self._one_alone = False
            else:
                self._sharing -= 1
            self._changed.notify_all()
