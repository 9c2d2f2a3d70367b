"""Log a compiled model's verdict with Lightning.

module.model.compile(backend="apollo")  # the network in the LightningModule, not the LightningModule itself
trainer = Trainer(callbacks=[ApolloCallback()])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_info
except ImportError:  # its older name
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.utilities import rank_zero_info

from apollo_compile.reports.values import Stage
from apollo_compile.tools.report import report, status

PAGE = "apollo.html"


class ApolloCallback(Callback):
    """Logs the verdict and `report.metrics()` once it is reached, and again if it changes; saves the page at the end.

    The verdict goes to Lightning's console, and the metrics to all loggers of the trainer; it is looked at every
    `log_every_n_steps` steps. If training ends before, they are logged then. The page is `apollo.html` in the trainer's
    `log_dir`, or in `default_root_dir` without one.
    """

    def __init__(self) -> None:
        self._told = ""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Log a new verdict."""
        if trainer.global_step % trainer.log_every_n_steps == 0 and not status(pl_module).startswith(Stage.MEASURING):
            self._tell(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what is known, and save the page on the first process."""
        self._tell(trainer, pl_module)
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # a collective: all processes evaluate it
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            report(pl_module).save_html(folder / PAGE)

    def _tell(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the verdict and the metrics, unless that line was logged before."""
        line = status(pl_module)
        if line != self._told:
            self._told = line
            rank_zero_info(line)
            metrics = report(pl_module).metrics()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
