"""A ledger of what the log and SGLang's own counters both count. Pure; times are unix seconds.

A line may come before the counter shows it, or after. Either source may fail, be read late, or begin again. So the
ledger keeps what only one of the two has shown so far:

- a *gain*: the counter grew, and no line has shown it. The next line of as many requests takes it.
- a line *ahead*: a line counted, and no counter has shown it. The next gain is set off against it.

Once both are read up to the same time, each retraction, rejection and failure has been counted once; until then none
is counted twice. A line that is as old as the first page is *unsure*: the counter may have begun with it.

Each start of the server has its own book, because its counters begin at 0. The log may show a start before the pages
do, or after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any, Literal, TypeAlias

from sglang_tuning_exporter.core.events import is_count, lists

PRINTED_SECONDS = 1.0  # SGLang prints whole seconds
SETTLED_SECONDS = 2.0  # after which a page shows what a line says
# After which the counter has shown a line, if a page came: some releases count with the next batch line.
UNSETTLED_SECONDS = 30.0
LATE_LINES_SECONDS = 10.0  # in which the line of a gain may still be written
REQUESTED_SECONDS = 60.0  # after a request, in which the line that it causes may come
UNREAD_SECONDS = 600.0  # for so long gains wait for a log that is read late, or not at all
MOST_ENTRIES = 512  # of an account: above it the oldest become one
MOST_BOOKS = 8

RETRACTED = "retracted_requests"
REQUESTS = "posted_requests"
# What the page counts at once: a line of it counts only while no page does.
COUNTED_BY_PAGE = ("rejected_requests", "server_errors", "failed_transfers")
NAMES = (RETRACTED, REQUESTS, *COUNTED_BY_PAGE)

Waiting: TypeAlias = Mapping["int | None", float]  # the numbers of lines that wait for a gain, by DP rank


@dataclass(slots=True)
class Entry:
    """A number that one source has shown and the other has not. `counted`: it counts already, as all of a line does."""

    at: float
    number: float
    dp: int | None
    counted: bool = True

    def is_like(self, other: Entry) -> bool:
        """Whether both may become one entry."""
        return (self.dp, self.counted) == (other.dp, other.counted)


@dataclass(slots=True)
class Account:
    """One kind in one start of the server: gains that no line has shown, and lines that no counter has shown."""

    gains: deque[Entry] = field(default_factory=deque)
    ahead: deque[Entry] = field(default_factory=deque)
    last_line: float = -inf  # the last line that is not unsure

    @property
    def uncounted(self) -> list[Entry]:
        """The gains that do not count yet."""
        return [gain for gain in self.gains if not gain.counted]

    def owed(self, dp: int | None) -> float:
        """Return how much of the gains of a DP rank no line has shown."""
        return sum(gain.number for gain in self.gains if _same(gain.dp, dp))

    def take(self, number: float, dp: int | None, *, only_counted: bool = False) -> tuple[float, float]:
        """Take a line's number from the gains; return how much of it they have, and how much of that counts already.

        Gains that count come first: the others may be kept for unsure lines.
        """
        taken = known = 0.0
        for gain in sorted(self.gains, key=lambda gain: not gain.counted):
            if _same(gain.dp, dp) and (gain.counted or not only_counted):
                part = min(gain.number, number - taken)
                gain.number, taken = gain.number - part, taken + part
                known += part if gain.counted else 0.0
        self.gains = deque(gain for gain in self.gains if gain.number > 0)
        return taken, known

    def count(self, until: float, read: float, waiting: Waiting, unsure: deque[Entry]) -> list[Entry]:
        """Count the gains from before `until` whose lines have not come; return them.

        Some gains are kept: for lines that wait, and for unsure lines, which may have counted them. Before `read` all
        lines are read: there an unsure line that may have a gain is set off against it for good.
        """
        counts, reserved = list[Entry](), deque(replace(line) for line in unsure)
        for gain, free in self._free(waiting):
            if gain.at < until and free > 0:
                number = _set_off(unsure if gain.at < read else reserved, free, gain.dp)
                gain.number -= free if gain.at < read else number
                if number > 0:
                    counts.append(Entry(gain.at, number, gain.dp))
                    self.gains.append(Entry(gain.at, number, gain.dp))
        self.gains = deque(gain for gain in self.gains if gain.number > 0)
        return counts

    def _free(self, waiting: Waiting) -> list[tuple[Entry, float]]:
        """Return the gains that do not count yet, each with what lines that wait leave of it."""
        free = [(gain, gain.number) for gain in self.uncounted]
        for dp, number in waiting.items():
            left = number
            for place, (gain, rest) in enumerate(free):
                if _same(gain.dp, dp):
                    free[place], left = (gain, rest - min(rest, left)), left - min(rest, left)
        return free


@dataclass(slots=True)
class Book:
    """The accounts of one start. `begun`: when a page first showed it."""

    begun: float = -inf
    accounts: dict[str, Account] = field(default_factory=dict)

    def of(self, name: str) -> Account:
        """Return the account of a kind."""
        return self.accounts.setdefault(name, Account())


def _set_off(lines: deque[Entry], number: float, dp: int | None) -> float:
    """Set a gain off against lines that counted before; return what is left of it."""
    for line in lines:
        if _same(line.dp, dp):
            known = min(line.number, number)
            line.number, number = line.number - known, number - known
    while lines and lines[0].number <= 0:
        lines.popleft()
    return number


def _add(entries: deque[Entry], new: Entry) -> None:
    """Add an entry, to the last one where that is of the same second."""
    last = entries[-1] if entries else None
    if last is not None and last.is_like(new) and 0 <= new.at - last.at < PRINTED_SECONDS:
        last.number += new.number
    else:
        entries.append(new)
    _shrink(entries)


def _same(one: int | None, other: int | None) -> bool:
    return one is None or other is None or one == other


def _shrink(entries: deque[Entry]) -> None:
    """Make one of the two oldest entries that are alike where there are too many."""
    if len(entries) <= MOST_ENTRIES:
        return
    for place, entry in enumerate(entries):
        like = next((other for other in islice(entries, place + 1, None) if other.is_like(entry)), None)
        if like is not None:
            like.number += entry.number
            del entries[place]
            return


class Ledger:
    """The accounts of what log and pages both count. `read_to`: the log is read up to this time."""

    def __init__(self) -> None:
        self.read_to = inf
        self.first_page: float | None = None  # when the first page with counters was asked for; None before it
        self._books = deque([Book()])
        self._ahead: Literal["", "log", "pages"] = ""  # which shows a start that the other does not show yet
        self._started = -inf  # when a page last showed a start
        self._uncounted: list[Entry] = []  # retracted requests of books that are closed
        # Lines that the first page may have had already. Any gain may be theirs, because lines take each other's gains.
        self._unsure: dict[str, deque[Entry]] = {name: deque() for name in NAMES}

    # Starts

    @property
    def log_is_ahead(self) -> bool:
        """Whether the log shows a start that no page has shown."""
        return self._ahead == "log"

    @property
    def log_is_behind(self) -> bool:
        """Whether pages show a start that the log has not shown: its lines are of the start before."""
        return self._ahead == "pages"

    def start_of_log(self, at: float) -> bool:
        """Open the book of a start that the log shows; return whether no page has shown it."""
        if self.is_before(at) or (self._ahead == "" and at < self._started):
            return True
        is_new = self._ahead != "pages"
        if self._ahead == "log":
            self._books.pop()
        if is_new:
            self._books.append(Book())
        if self.is_shown(at):  # then the gains so far may be of this start
            for name, account in self._books[0].accounts.items():
                self._books[1].of(name).gains.extendleft(reversed(account.gains))
                account.gains.clear()
        if is_new:
            self._ahead = "log"
        else:
            self._close()
        return is_new

    def start_of_pages(self, now: float) -> bool:
        """Open the book of a start that a page shows; return whether the log has not shown it."""
        self._started = now
        if self._ahead == "log":
            self._close()
            return False
        self._books.append(Book(now))
        self._ahead = "pages"
        if len(self._books) > MOST_BOOKS:
            self._close()
        return True

    def is_shown(self, at: float) -> bool:
        """Whether pages may have shown a start that the log shows: it is older than the present one's first page."""
        return min(at, self.read_to) < max(self._started, self.first_page or -inf)

    def same_start(self) -> None:
        """Note a page whose counters go on: what the log showed was no start, or its counters are larger already."""
        if self._ahead != "log":
            return
        self._ahead, old = "", self._books.popleft()
        for name, account in old.accounts.items():
            present = self._books[0].of(name)
            present.gains.extendleft(reversed(account.gains))
            present.ahead.extendleft(reversed(account.ahead))
            present.last_line = max(present.last_line, account.last_line)

    def catch_up(self) -> None:
        """Close the books of starts that the log does not show, though it is read beyond them."""
        while self._ahead == "pages" and self._books[1].begun <= self.read_to:
            self._close()

    def _close(self) -> None:
        """Close the oldest book: no line and no page of it comes any more."""
        for name, account in self._books.popleft().accounts.items():
            self._uncounted += account.count(inf, inf, {}, self._unsure[name]) if name == RETRACTED else []
        if len(self._books) == 1:
            self._ahead = ""

    def _of_log(self, name: str) -> Account:
        return self._books[-1 if self._ahead == "log" else 0].of(name)

    def _of_pages(self, name: str) -> Account:
        return self._books[0 if self._ahead == "log" else -1].of(name)

    # Pages

    def begin(self, begun: float) -> None:
        """Note that the first page with counters was asked for at `begun`: they have what lines showed before."""
        self.first_page = begun
        for name, account in self._accounts():
            for line in account.ahead:
                if line.at >= begun - PRINTED_SECONDS:
                    _add(self._unsure[name], line)
            account.ahead.clear()

    def gain(self, name: str, number: float, at: float, dp: int | None = None) -> float:
        """Take what a counter gained; return how much of it counts at once."""
        if number <= 0:
            return 0.0
        account, counts = self._of_pages(name), name != RETRACTED
        number = _set_off(account.ahead, number, dp)
        if counts:
            number = _set_off(self._unsure[name], number, dp)
        if number > 0:
            _add(account.gains, Entry(at, number, dp, counts))
        return number if counts else 0.0

    def settle(self, begun: float) -> None:
        """Forget the lines ahead that a page asked for at `begun` must have shown. Its gains are taken before.

        All unsure lines go together, once no gain is left that may be theirs, and no other line has come for as long.
        """
        shown = begun - UNSETTLED_SECONDS
        for _, account in self._accounts():
            account.ahead = deque(line for line in account.ahead if line.at > shown)
        for name, unsure in self._unsure.items():
            accounts = [book.of(name) for book in self._books]
            is_calm = all(account.last_line <= shown and not account.uncounted for account in accounts)
            if is_calm and unsure and unsure[-1].at <= shown:
                unsure.clear()

    # Lines

    def can_be_before(self, at: float) -> bool:
        """Whether a line can be from before the first page: then its counters may have it already."""
        return self.first_page is not None and min(at, self.read_to) < self.first_page + SETTLED_SECONDS

    def is_before(self, at: float) -> bool:
        """Whether a line is from before the first page, so that no gain has it."""
        return self.first_page is not None and at < self.first_page - PRINTED_SECONDS

    def is_of_another_time(self, at: float) -> bool:
        """Whether no page can show what a line says: it is older than the first page, or than the start of the last."""
        return self.log_is_behind or self.is_before(at)

    def covers(self, name: str, number: float, dp: int | None = None) -> bool:
        """Whether the counter gained what a line shows, and no other line has shown it."""
        return self._of_log(name).owed(dp) >= number - 1e-9

    def pay(self, name: str, number: float = 1.0) -> bool:
        """Take a line's number from what the counter gained; whether it gained so much."""
        if not self.covers(name, number):
            return False
        self._of_log(name).take(number, None)
        return True

    def show(self, name: str, number: float, at: float, dp: int | None = None) -> float:
        """Take the number of a line that counts; return how much of it has not been counted."""
        if self.is_before(at):
            return number
        account, is_sure = self._of_log(name), not self.can_be_before(at)
        # An unsure line may have no gain: it leaves gains to lines that surely have one.
        taken, known = account.take(number, dp, only_counted=not is_sure)
        account.last_line = max(account.last_line, at) if is_sure else account.last_line
        if taken < number:
            _add(account.ahead if is_sure else self._unsure[name], Entry(at, number - taken, dp))
        return number - known

    def overdue(self, now: float, waiting: Mapping[str, Waiting], *, reads: bool = True) -> list[Entry]:
        """Return the retracted requests that count by the counter alone, because their lines have not come.

        waiting: by account, the numbers of lines that wait: their gains are kept. reads: there is a log.
        """
        read = min(now, self.read_to) - LATE_LINES_SECONDS if reads else inf  # before it no line is missing
        until = max(read, now - UNREAD_SECONDS - LATE_LINES_SECONDS)
        counts, self._uncounted = self._uncounted, []
        for book in self._books:
            counts += book.of(RETRACTED).count(until, read, waiting.get(RETRACTED, {}), self._unsure[RETRACTED])
            for name, account in book.accounts.items():
                late = read - (REQUESTED_SECONDS - LATE_LINES_SECONDS if name == REQUESTS else 0.0)
                if not waiting.get(name):
                    account.gains = deque(gain for gain in account.gains if not gain.counted or gain.at >= late)
        return counts

    def _accounts(self) -> Iterator[tuple[str, Account]]:
        return (entry for book in self._books for entry in book.accounts.items())

    # A restart of the exporter

    def saved(self, now: float) -> dict[str, object]:
        """Return the accounts as plain JSON, times as ages in seconds."""
        times = {"started": self._started, "read_to": self.read_to, "first_page": self.first_page}
        return {
            **{name: now - at for name, at in times.items() if at is not None and abs(at) < inf},
            "ahead": self._ahead,
            "uncounted": _saved(self._uncounted, now),
            "unsure": {name: _saved(lines, now) for name, lines in self._unsure.items() if lines},
            "books": [
                [
                    None if book.begun == -inf else now - book.begun,
                    {
                        name: [
                            _saved(account.gains, now),
                            _saved(account.ahead, now),
                            min(now - account.last_line, UNSETTLED_SECONDS),
                        ]
                        for name, account in book.accounts.items()
                        if account.gains or account.ahead
                    },
                ]
                for book in self._books
            ],
        }

    def restore(self, saved: object, then: float) -> None:
        """Go on from what `saved` returned at `then`; what cannot be read is left out."""
        document: Mapping[str, Any] = saved if isinstance(saved, dict) else {}
        times = {name: then - age for name, age in document.items() if is_count(age)}
        self._started, self.read_to = times.get("started", -inf), times.get("read_to", self.read_to)
        self.first_page = times.get("first_page")
        self._uncounted = list(_restored(document.get("uncounted"), then))
        match document.get("unsure"):
            case dict() as unsure:
                for name in NAMES:
                    self._unsure[name] = _restored(unsure.get(name), then)
        books = [_book(entry, then) for entry in islice(lists(document.get("books")), MOST_BOOKS)]
        self._books = deque(books or [Book()])
        is_log = document.get("ahead") == "log" and len(self._books) == 2
        self._ahead = "" if len(self._books) == 1 else "log" if is_log else "pages"


def _book(saved: Any, then: float) -> Book:
    match saved:
        case [begun, dict() as accounts]:
            known = {name: _account(accounts[name], then) for name in NAMES if name in accounts}
            return Book(then - begun if is_count(begun) else -inf, known)
    return Book()


def _account(saved: Any, then: float) -> Account:
    match saved:
        case [gains, ahead, last] if is_count(last):
            return Account(_restored(gains, then), _restored(ahead, then), then - last)
    return Account()


def _saved(entries: Iterable[Entry], now: float) -> list[list[object]]:
    return [[now - entry.at, entry.number, entry.dp, entry.counted] for entry in entries]


def _restored(saved: object, then: float) -> deque[Entry]:
    entries = deque[Entry]()
    for entry in islice(lists(saved), MOST_ENTRIES):
        match entry:
            case [age, number, None | int() as dp, bool() as counted] if is_count(age) and is_count(number):
                entries.append(Entry(then - age, float(number), dp, counted))
    return entries
