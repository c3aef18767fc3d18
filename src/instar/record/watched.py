"""A record that tells when a person should look at the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from instar.record.alerts import Rules
from instar.record.events import Event, RecordError, Warn
from instar.record.notify import Notifier
from instar.record.recorder import Sink


class Watched:
    """A sink that writes to another sink first, then asks the rules what is to be told: to the
    record, to `tell`, and to whom the notifier reaches.
    """

    def __init__(
        self, sink: Sink, rules: Rules, notifier: Notifier, tell: Callable[[str], None]
    ) -> None:
        self._sink, self._rules, self._notifier, self._tell = sink, rules, notifier, tell

    def write(self, event: Event) -> None:
        self._sink.write(event)
        for alert in self._rules.see(event):
            self._sink.write(alert)
            self._tell(alert.message)
            self._notifier.send(alert)
        self._say_troubles()

    def sync(self) -> None:
        self._sink.sync()

    def close(self) -> None:
        """Wait a little for what is still to be told; close the record."""
        try:
            self._notifier.close()
            with suppress(RecordError):
                self._say_troubles()
        finally:
            self._sink.close()

    def _say_troubles(self) -> None:
        for trouble in self._notifier.troubles():
            self._sink.write(Warn(message=trouble))
            self._tell(trouble)
