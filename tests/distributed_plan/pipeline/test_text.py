"""Plans as text; tables are compared by the commands that print them."""

from __future__ import annotations

from apollo_compile.distributed.pipeline.durations import Durations, StepPrediction
from apollo_compile.distributed.pipeline.text import format_prediction
from apollo_compile.distributed.pipeline.values import StageTimes
from apollo_compile.units import NS_PER_MS


def test_a_prediction_says_what_it_was_made_from() -> None:
    """Stages as a range, encoders as sums of their segments."""
    prediction = StepPrediction(
        durations=Durations(
            times=StageTimes(forward_ns=(NS_PER_MS, 3 * NS_PER_MS), backward_ns=(4 * NS_PER_MS,) * 2),
            forward_ns=((NS_PER_MS, NS_PER_MS), (5 * NS_PER_MS,)),
            backward_ns=((2 * NS_PER_MS, 3 * NS_PER_MS), ()),
        ),
        step_ns=40 * NS_PER_MS,
        plain_ns=35 * NS_PER_MS,
        hidden_share=0.875,
    )
    assert format_prediction(prediction, ["images", "sounds"]) == (
        "stages 1.00 ms to 3.00 ms forward, 4.00 ms backward; images 2.00 ms forward, 5.00 ms backward; "
        "sounds 5.00 ms forward; steps are predicted to take 40.00 ms, 35.00 ms without encoders, "
        "with 88% of the encoder work in bubbles"
    )
