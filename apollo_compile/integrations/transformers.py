"""Log a compiled model's metrics with the Hugging Face Trainer.

model.compile(backend="apollo")
trainer = Trainer(model, args, train_dataset=dataset)
trainer.add_callback(ApolloCallback(trainer))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from apollo_compile.reports.metrics import PREFIX
from apollo_compile.tools.report import report

PAGE = "apollo.html"


class ApolloCallback(TrainerCallback):
    """Logs `report.metrics()` whenever the Trainer logs, and saves the page of the report when training ends.

    The metrics go to the targets of `report_to` and into `trainer.state.log_history`; the page is `apollo.html` in
    `output_dir`.

    Arguments:
        trainer: the Trainer to which the callback is added, with a compiled model.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Log the metrics after the Trainer's own logs; logging them calls this again, which then does nothing."""
        if not any(name.startswith(PREFIX) for name in logs or ()):
            self._trainer.log(report(self._trainer.model).metrics())

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save the page, on the first process."""
        if state.is_world_process_zero and args.output_dir is not None:
            folder = Path(args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            report(self._trainer.model).save_html(folder / PAGE)
