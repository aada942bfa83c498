"""The tests of the runtime and of recovery, on a runtime that is on the other side of a link.

Left out: tests that look at the state of the queue at the very moment that they submit, which a far server has not seen
then, or at the very calls of the worker, and those that start worker processes.
"""

from __future__ import annotations

import pytest

from tests.workers import test_recovery, test_runtime
from tests.workers.remote.harness import running
from tests.workers.test_recovery import (  # noqa: F401 (collected here, on another runtime)
    test_a_call_that_fails_as_a_whole_sets_its_models_back_to_the_log,
    test_a_hung_turn_is_a_dead_worker_and_its_operation_runs_again,
    test_a_log_that_cannot_be_read_now_is_read_later,
    test_a_model_comes_back_with_its_gradient_and_goes_on,
    test_an_operation_that_fails_when_it_is_executed_again_loses_its_model,
    test_snapshots_that_cannot_be_recorded_are_tried_again_and_hold_nobody_up,
    test_what_cannot_be_read_back_is_lost_and_not_rewound,
)
from tests.workers.test_runtime import (  # noqa: F401 (as above)
    test_a_failed_creation_fails_what_follows_and_says_why,
    test_a_failed_operation_does_not_poison_later_ones,
    test_any_arrival_order_gives_the_in_order_result,
    test_cancelling_while_the_request_is_read_back_does_not_disturb_the_runtime,
    test_models_and_projects_take_turns,
    test_of_one_model_at_most_one_operation_is_loaded_ahead,
    test_training_cannot_be_cancelled,
    test_unopened_and_never_created_models_are_not_found,
)


@pytest.fixture(autouse=True)
def _far(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_runtime, test_recovery):
        monkeypatch.setattr(module, "running", running)
