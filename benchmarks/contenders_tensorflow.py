"""The same training step in TensorFlow: sampled_softmax_loss, compiled into a graph, with three kinds of update.

Keras 3 takes the square root of Adagrad's whole state in each step, even if few rows have a gradient; the optimiser of
TensorFlow 1 does not. This module has both, and a step without an update.
"""

import itertools
import os
from collections.abc import Callable

import numpy as np

BATCH_SIZE, K, DIM = 256, 1000, 128
LEARNING_RATE = 0.01

Step = Callable[[], object]


def no_update(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Return a step that computes gradients only."""
    return _step(num_classes, targets, lambda tf: None)


def adagrad(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Return a step with the Adagrad of TensorFlow 1."""
    return _step(num_classes, targets, lambda tf: tf.compat.v1.train.AdagradOptimizer(LEARNING_RATE))


def keras_adagrad(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Return a step with the Adagrad of Keras 3."""
    return _step(num_classes, targets, lambda tf: tf.keras.optimizers.Adagrad(LEARNING_RATE))


def _step(num_classes: int, targets: np.ndarray, make_optimizer: Callable) -> Step:
    import tensorflow as tf

    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    # Eager initialisation holds intermediate tensors that take more memory than training does; a graph does not.
    uniform = tf.function(lambda: tf.random.uniform((num_classes, DIM), -(DIM**-0.5), DIM**-0.5))
    weight = tf.Variable(uniform())
    bias = tf.Variable(tf.zeros(num_classes))
    hidden = tf.Variable(tf.random.normal((BATCH_SIZE, DIM)))
    optimizer = make_optimizer(tf)

    @tf.function
    def graph(target):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sampled_softmax_loss(weight, bias, target, hidden, K, num_classes))
        rows, shifts, back = tape.gradient(loss, [weight, bias, hidden])
        if optimizer is None:
            # Return the gradients: TensorFlow does not compute values that a graph does not return.
            return loss, back, rows.values, shifts.values
        optimizer.apply_gradients([(rows, weight), (shifts, bias)])
        return loss, back

    batches = itertools.cycle([tf.constant(target[:, None]) for target in targets])
    return lambda: graph(next(batches))[0].numpy()
