"""Log a compiled model's metrics with Lightning.

module.model.compile(backend="apollo")  # the network in the LightningModule, not the LightningModule itself
trainer = Trainer(callbacks=[ApolloCallback()])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # its older name
    from pytorch_lightning import Callback, LightningModule, Trainer

from apollo_compile.tools.report import report

PAGE = "apollo.html"


class ApolloCallback(Callback):
    """Logs `report.metrics()` every `log_every_n_steps` steps, and saves the page of the report when training ends.

    The metrics go to all loggers of the trainer; the page is `apollo.html` in its `log_dir`, or in `default_root_dir`
    without one.
    """

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Log the metrics every `log_every_n_steps` steps."""
        if trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0:
            metrics = report(pl_module).metrics()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the page, on the first process."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # a collective: all processes evaluate it
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            report(pl_module).save_html(folder / PAGE)
