"""Writes the things that the store's tests need. Not responsible for checking them."""

from __future__ import annotations

from datetime import UTC, datetime

from store.database import Store
from store.operations import append
from store.records import NewOperation, OperationRecord
from store.runs import create_run
from store.sessions import create_session

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


class Make:
    """Writes the things that a test needs, with what does not matter to it filled in."""

    def __init__(self, store: Store, project: str) -> None:
        self.store = store
        self.project = project

    def new(self, request_id: str, *, seq_id: int | None = 1, digest: str = "d", **changes: object) -> NewOperation:
        values: dict[str, object] = {
            "request_id": request_id,
            "project_id": self.project,
            "kind": "optim_step",
            "scope": "model:m",
            "seq_id": seq_id,
            "digest": digest,
            "body": b"body",
            "created_at": NOW,
        }
        return NewOperation(**(values | changes))  # type: ignore[arg-type]

    async def operation(self, request_id: str, **changes: object) -> tuple[OperationRecord, bool]:
        new = self.new(request_id, **changes)  # type: ignore[arg-type]
        return await self.store.write(lambda db: append(db, new))

    async def session(self, session_id: str = "s", now: datetime = NOW) -> str:
        await self.store.write(
            lambda db: create_session(
                db,
                session_id=session_id,
                project_id=self.project,
                tags=["a", "b"],
                user_metadata={"who": "me"},
                sdk_version="0.38.0",
                display_name=None,
                idempotency_key=None,
                now=now,
            )
        )
        return session_id

    async def run(self, model_seq_id: int = 0, session_id: str = "s", now: datetime = NOW) -> str:
        model_id = f"{session_id}:train:{model_seq_id}"
        await self.store.write(
            lambda db: create_run(
                db,
                model_id=model_id,
                project_id=self.project,
                session_id=session_id,
                model_seq_id=model_seq_id,
                base_model="tiny",
                lora=None,
                user_metadata={},
                optimizer_type=None,
                now=now,
            )
        )
        return model_id
