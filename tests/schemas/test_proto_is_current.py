"""The generated protobuf code belongs to the .proto beside it, and the .proto to the SDK's own descriptor."""

import subprocess
import sys
from pathlib import Path

from tinker.proto import tinker_public_pb2 as sdk

from schemas.proto import tinker_public_pb2 as ours

ROOT = Path(__file__).parents[2]
SOURCE = "schemas/proto/tinker_public.proto"


def test_generated_code_is_current(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([*command, SOURCE], cwd=ROOT, check=True, timeout=60)
    for name in ("tinker_public_pb2.py", "tinker_public_pb2.pyi"):
        fresh = (tmp_path / "schemas/proto" / name).read_text()
        assert fresh == (ROOT / "schemas/proto" / name).read_text(), f"generate {name} again (see {SOURCE})"


def _fields(descriptor: object) -> set[tuple[object, ...]]:
    messages = list(descriptor.message_types_by_name.values())  # type: ignore[attr-defined]
    found: set[tuple[object, ...]] = set()
    while messages:
        message = messages.pop()
        messages.extend(message.nested_types)
        name = message.full_name.split(".", message.file.package.count(".") + 1)[-1]
        for field in message.fields:
            oneof = field.containing_oneof.name if field.containing_oneof else ""
            found.add((name, field.name, field.number, field.type, field.is_repeated, oneof))
    return found


def test_fields_are_those_of_the_sdk() -> None:
    assert _fields(ours.DESCRIPTOR) == _fields(sdk.DESCRIPTOR)
    for name in ("DType", "StopReason"):
        assert getattr(ours, name).items() == getattr(sdk, name).items()
