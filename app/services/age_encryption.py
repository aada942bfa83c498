"""Exports that only the holder of a key can read: age (filippo.io/age), by the library pyrage.

Responsible for recipients and for turning a folder of plain files into one of `{name}.age`. Not responsible for which
files an export has (`exports.py`) or for who may fetch them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from pyrage import RecipientError, encrypt_io, ssh, x25519

from schemas.errors import EngineFailure, InvalidRequest
from store.files import fsync_file, fsync_folder

SUFFIX = ".age"
FIELD = "age_encryption_recipients"

Recipient: TypeAlias = x25519.Recipient | ssh.Recipient


def parse_recipients(texts: Sequence[str]) -> tuple[Recipient, ...]:
    """The public keys that may decrypt.

    Raises:
        InvalidRequest: one is not a public key of an accepted type. It is named by its place, and not quoted: what was
            pasted may be a secret key.
    """
    return tuple(_parse(text.strip(), index) for index, text in enumerate(texts))


def encrypt_folder(folder: Path, names: Sequence[str], recipients: Sequence[Recipient]) -> int:
    """Replace the content of `folder` by `{name}.age` of each of `names`; every other file in it is removed.

    Blocks. Plain files go only when all are encrypted, and doing it again changes nothing. A crash in between leaves a
    folder that no checkpoint names, which is swept at the next start.

    Returns:
        The size of the encrypted files in bytes.

    Raises:
        EngineFailure: a file cannot be read or written.
    """
    try:
        return _encrypt(folder, names, recipients)
    except OSError as error:
        raise EngineFailure(
            f"the export could not be encrypted: {error.strerror or 'input/output error'}",
            hint="export again when the server's disk takes it",
            code="checkpoint_not_written",
        ) from error


def _encrypt(folder: Path, names: Sequence[str], recipients: Sequence[Recipient]) -> int:
    for name in names:
        if not (folder / name).exists():
            continue
        target = folder / f"{name}{SUFFIX}"
        with (folder / name).open("rb") as plain, target.open("wb") as encrypted:
            # Not encrypt_file: that one holds the interpreter, and with it the event loop, for the whole file.
            encrypt_io(plain, encrypted, recipients)
        fsync_file(target)
    for path in folder.iterdir():
        if path.suffix != SUFFIX:
            path.unlink()
    fsync_folder(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def _parse(text: str, index: int) -> Recipient:
    kind = ssh.Recipient if text.startswith("ssh-") else x25519.Recipient
    try:
        return kind.from_str(text)
    except RecipientError:
        raise InvalidRequest(
            f"{FIELD}[{index}] is not a public key that can be encrypted to",
            field=f"{FIELD}[{index}]",
            hint="accepted are age X25519 recipients (age1...) and SSH public keys of type ssh-ed25519 and ssh-rsa",
        ) from None
