"""Compile with the Hugging Face Trainer, and log its verdict.

register()  # once; then TrainingArguments(torch_compile_backend="apollo")
trainer = Trainer(model, args, train_dataset=dataset)
trainer.add_callback(ApolloCallback(trainer))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from apollo_compile.reports.values import Stage
from apollo_compile.tools.report import report, status

PAGE = "apollo.html"

_logger = logging.get_logger("transformers.apollo_compile")


def register() -> None:
    """Let accelerate, and with it the Trainer, know the backend: its list of backends is closed.

    From then on, `TrainingArguments(torch_compile_backend="apollo")`, `Accelerator(dynamo_backend="apollo")` and
    `TorchDynamoPlugin(backend="apollo")` compile with apollo. Calling it again changes nothing.

    Raises:
        ImportError: accelerate is not installed.
    """
    from accelerate.utils import DynamoBackend

    member = str.__new__(DynamoBackend, "APOLLO")
    member._name_ = member._value_ = "APOLLO"
    DynamoBackend._missing_ = classmethod(lambda _, value: member if value == "APOLLO" else None)


class ApolloCallback(TrainerCallback):
    """Logs the verdict and `report.metrics()` once it is reached, and again if it changes; saves the page at the end.

    The verdict goes to the logger of transformers, and the metrics to the targets of `report_to` and into
    `trainer.state.log_history`. If training ends before, they are logged then. The page is `apollo.html` in
    `output_dir`.

    Arguments:
        trainer: the Trainer to which the callback is added, with a compiled model.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._told = ""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log a new verdict; logging its metrics calls this again, which then does nothing."""
        if not status(self._trainer.model_wrapped).startswith(Stage.MEASURING):
            self._tell()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log what is known, and save the page on the first process."""
        self._tell()
        if state.is_world_process_zero and args.output_dir is not None:
            folder = Path(args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            report(self._trainer.model_wrapped).save_html(folder / PAGE)

    def _tell(self) -> None:
        """Log the verdict and the metrics, unless that line was logged before."""
        line = status(self._trainer.model_wrapped)
        if line != self._told:
            self._told = line
            _logger.warning(line)  # as the Trainer tells what its users are to see
            self._trainer.log(report(self._trainer.model_wrapped).metrics())
