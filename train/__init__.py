"""Training: text to batches, the two-phase loop, checkpoints. `python -m nosa_jax.train --help` lists the settings."""

from nosa_jax.checkpoint import export_model, load_model
from nosa_jax.errors import InputError
from nosa_jax.train.batches import BatchStream, PackedWindows, evaluation_batches
from nosa_jax.train.checkpoints import CheckpointStore
from nosa_jax.train.config import Optimizer, Phase, TrainConfig
from nosa_jax.train.corpus import Corpus, Document, build_corpus, read_documents, split_documents
from nosa_jax.train.errors import RunFailure
from nosa_jax.train.loop import TrainResult, train
from nosa_jax.train.loss import cross_entropy, mean_loss, next_token_loss
from nosa_jax.train.metrics import plot_loss, read_metrics
from nosa_jax.train.step import TrainState, loss_and_gradients, make_eval_step, make_train_step

__all__ = [
    "BatchStream", "CheckpointStore", "Corpus", "Document", "InputError", "Optimizer", "PackedWindows", "Phase",
    "RunFailure", "TrainConfig", "TrainResult", "TrainState", "build_corpus", "cross_entropy", "evaluation_batches",
    "export_model", "load_model", "loss_and_gradients", "make_eval_step", "make_train_step", "mean_loss",
    "next_token_loss", "plot_loss", "read_documents", "read_metrics", "split_documents", "train",
]  # fmt: skip
