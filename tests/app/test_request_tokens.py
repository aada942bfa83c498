"""The size of one training request: refused at the door with the numbers, and without harm to what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.api import datum, serving


async def test_more_tokens_than_a_request_may_have(tiny_settings: Callable[..., Any]) -> None:
    async with serving(tiny_settings(max_request_tokens=5)) as api:
        model = await api.model()
        fits, too_large = [datum(3, 4, 5), datum(6, 7, 8, 9)], [datum(3, 4, 5, 6), datum(6, 7, 8, 9)]
        for route in ("forward", "forward_backward"):
            body = {"model_id": model, "loss_fn": "cross_entropy", "data": too_large}
            refused = (await api.post(route, **body)).json()
            assert refused["error"]["code"] == "request_too_large"
            assert refused["error"]["field"] == "data"
            assert "6 tokens in 2 datums" in refused["detail"]
            assert "at most 5" in refused["detail"]
        await api.train(model, data=fits)
