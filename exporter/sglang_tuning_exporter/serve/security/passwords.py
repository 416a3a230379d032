"""Names and passwords against bcrypt hashes: slow on purpose, so what was right once is remembered."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_REMEMBERED = 100
BCRYPT_BYTES = 72  # of a password that bcrypt looks at; what hashed a longer one cut it there


class Passwords:
    """Who may come in. Passwords are remembered as keyed digests, never themselves, and only right ones."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._lock = (
            threading.Lock()
        )  # never held during a bcrypt: whoever is remembered does not wait for those who guess
        self._nobody: dict[int, bytes] = {}

    def remembers(self, users: Mapping[str, str], header: str | None) -> bool | None:
        """Tell from an Authorization header whether it is let in; None when only bcrypt can say."""
        parsed = _parsed(header)
        if parsed is None:
            return False
        name, password = parsed
        known = self._digest(name, users.get(name, ""), password)
        with self._lock:
            if name in users and known in self._right:
                self._right.move_to_end(known)
                return True
        return None

    def verify(self, users: Mapping[str, str], header: str | None) -> bool:
        """Say the same by bcrypt, which takes its time: as long for a name that nobody has as for a wrong password."""
        import bcrypt  # noqa: PLC0415 - for those who have passwords alone

        parsed = _parsed(header)
        if parsed is None:
            return False
        name, password = parsed
        hashed = users.get(name)
        against = hashed.encode() if hashed is not None else self._hash_of_nobody(users)
        try:
            is_right = bcrypt.checkpw(password[:BCRYPT_BYTES], against)
        except ValueError:  # a NUL, which bcrypt does not take
            is_right = False
        if hashed is None or not is_right:
            return False
        with self._lock:
            self._right[self._digest(name, hashed, password)] = None
            if len(self._right) > MOST_REMEMBERED:
                self._right.popitem(last=False)
        return True

    def _digest(self, name: str, hashed: str, password: bytes) -> bytes:
        """One that holds only while the user's hash is the same."""
        digest = hashlib.blake2b(key=self._key)
        for part in (name.encode("utf-8", "surrogatepass"), hashed.encode(), password):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()

    def _hash_of_nobody(self, users: Mapping[str, str]) -> bytes:
        """A hash as dear as the dearest of the users', which no password fits."""
        import bcrypt  # noqa: PLC0415 - as above

        cost = max(int(hashed[4:6]) for hashed in users.values())
        if cost not in self._nobody:
            self._nobody[cost] = bcrypt.gensalt(cost) + b"." * 31
        return self._nobody[cost]


def _parsed(header: str | None) -> tuple[str, bytes] | None:
    """Take an Authorization header apart into name and password; None for anything but a Basic one."""
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
        return (name.decode("utf-8"), password) if colon else None
    except (binascii.Error, ValueError):  # ValueError: not ASCII, or a name that is not UTF-8
        return None
