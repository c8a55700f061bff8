"""Every planted fault is named exactly, and no healthy step is blamed."""

import pytest
import torch
from zoo import ZOO, Truth

from nanlab import locate
from nanlab.tracing import Report
from nanlab.tracing.causes import CAUSES

FAULTS = [truth for truth in ZOO.values() if not truth.healthy]
HEALTHY = [truth for truth in ZOO.values() if truth.healthy]


def report_on(truth: Truth) -> Report:
    torch.manual_seed(0)
    case = truth.make()
    return locate(case.step, model=case.model, optimizer=case.optimizer, **case.batch)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("truth", FAULTS, ids=lambda t: t.name)
def test_a_planted_fault_is_named_exactly(truth):
    report = report_on(truth)
    assert (report.cause, report.phase, report.kind) == (truth.cause, truth.phase, truth.kind), str(report)
    assert not truth.op or report.op in truth.op, str(report)
    assert truth.module is None or report.module == truth.module, str(report)
    assert not truth.line or report.source == truth.line, str(report)
    assert truth.rows is None or report.rows == truth.rows, str(report)
    assert report.lesson == CAUSES[truth.cause].lesson
    assert report.advice
    assert report.story


@pytest.mark.parametrize("truth", HEALTHY, ids=lambda t: t.name)
def test_a_healthy_step_is_not_blamed(truth):
    report = report_on(truth)
    assert not report.found, str(report)
    assert report.exception is None


def test_the_zoo_has_the_sixteen_faults_of_the_prototype_and_every_line_it_promises():
    assert sum(truth.in_prototype for truth in FAULTS) == 16
    without_line = {t.name for t in FAULTS if not t.line and t.cause not in ("bad_input", "bad_state")}
    assert without_line == {  # their line is that of the shared step
        "learning_rate_that_explodes", "adam_eps_in_half", "adam_eps_in_half_foreach", "step_too_long_for_float32",
        "second_moment_overflows",
    }  # fmt: skip


def test_every_cause_has_a_fault():
    assert {truth.cause for truth in FAULTS} | {"inf_minus_inf"} == set(CAUSES)
