"""Check of names and passwords against bcrypt hashes, which is slow on purpose; successful checks are cached."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping

MOST_CACHED = 100
BCRYPT_BYTES = 72  # of a password that bcrypt uses; tools that hash longer ones cut them here


class Passwords:
    """Checks credentials. Right ones are cached as keyed digests, never as text."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._verified: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()  # never held during a bcrypt: cached users do not wait for guesses
        self._dummy_hashes: dict[int, bytes] = {}

    def is_cached(self, users: Mapping[str, str], name: str, password: bytes) -> bool:
        """Return whether this password was found right before; else bcrypt has to decide."""
        known = self._digest(name, users.get(name, ""), password)
        with self._lock:
            is_known = name in users and known in self._verified
            if is_known:
                self._verified.move_to_end(known)
        return is_known

    def verify(self, users: Mapping[str, str], name: str, password: bytes) -> bool:
        """Return whether bcrypt finds the password right. An unknown name takes as long as a wrong password."""
        import bcrypt  # noqa: PLC0415 - only where passwords are set

        hashed = users.get(name)
        against = hashed.encode() if hashed is not None else self._dummy_hash(users)
        try:
            is_right = bcrypt.checkpw(password[:BCRYPT_BYTES], against)
        except ValueError:  # a NUL, which bcrypt refuses
            is_right = False
        if hashed is None or not is_right:
            return False
        with self._lock:
            self._verified[self._digest(name, hashed, password)] = None
            if len(self._verified) > MOST_CACHED:
                self._verified.popitem(last=False)
        return True

    def _digest(self, name: str, hashed: str, password: bytes) -> bytes:
        """Return a digest that is valid only while the user's hash is unchanged."""
        digest = hashlib.blake2b(key=self._key)
        for part in (name.encode("utf-8", "surrogatepass"), hashed.encode(), password):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()

    def _dummy_hash(self, users: Mapping[str, str]) -> bytes:
        """Return a hash with the highest cost of all users' hashes, which no password matches."""
        import bcrypt  # noqa: PLC0415 - as above

        cost = max(int(hashed[4:6]) for hashed in users.values())
        if cost not in self._dummy_hashes:
            self._dummy_hashes[cost] = bcrypt.gensalt(cost) + b"." * 31
        return self._dummy_hashes[cost]


def credentials(header: str | None) -> tuple[str, bytes] | None:
    """Parse an Authorization header into name and password; None for anything but Basic."""
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
        return (name.decode("utf-8"), password) if colon else None
    except (binascii.Error, ValueError):  # ValueError: not ASCII, or a name that is not UTF-8
        return None
