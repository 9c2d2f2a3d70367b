"""Train a small CLIP with the Hugging Face Trainer, which logs apollo's metrics beside the loss."""

from __future__ import annotations

import torch
from clip import make_model
from transformers import Trainer, TrainingArguments

from apollo_compile.integrations.transformers import ApolloCallback


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, object]:
    """Return a batch for which the model computes the loss."""
    return {**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}, "return_loss": True}


def train(backend: str = "apollo", *, steps: int = 60, width: int = 256, layers: int = 4) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(0)
    model = make_model(width, layers)
    model.compile(backend=backend)
    dataset = [
        {"input_ids": torch.randint(1000, (32,)), "pixel_values": torch.randn(3, 64, 64)} for _ in range(8 * steps)
    ]
    args = TrainingArguments(
        output_dir="trainer",
        max_steps=steps,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",  # or tensorboard, wandb, ...: the metrics go there too
        use_cpu=True,
        remove_unused_columns=False,
        save_strategy="no",
    )
    trainer = Trainer(model, args, train_dataset=dataset, data_collator=collate)
    if backend == "apollo":
        trainer.add_callback(ApolloCallback(trainer))
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    train()
    print("the report is in trainer/apollo.html")
