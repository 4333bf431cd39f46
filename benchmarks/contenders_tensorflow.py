"""The same training step in TensorFlow: sampled_softmax_loss, compiled into a graph, with each way to update.

Keras 3 takes the square root of Adagrad's whole state in each step, however few rows have a gradient; the optimiser of
TensorFlow 1 does not. Both are here, and a step without any.
"""

import itertools
import os
from collections.abc import Callable

import numpy as np

BATCH, K, DIM = 256, 1000, 128
RATE = 0.01

Step = Callable[[], object]


def no_update(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    return _step(num_classes, targets, lambda tf: None)


def adagrad(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    return _step(num_classes, targets, lambda tf: tf.compat.v1.train.AdagradOptimizer(RATE))


def keras_adagrad(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    return _step(num_classes, targets, lambda tf: tf.keras.optimizers.Adagrad(RATE))


def _step(num_classes: int, targets: np.ndarray, make_optimizer: Callable) -> Step:
    import tensorflow as tf

    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    # In a graph: made one by one, the steps to random numbers take more memory than training does.
    uniform = tf.function(lambda: tf.random.uniform((num_classes, DIM), -(DIM**-0.5), DIM**-0.5))
    weight = tf.Variable(uniform())
    bias = tf.Variable(tf.zeros(num_classes))
    hidden = tf.Variable(tf.random.normal((BATCH, DIM)))
    optimizer = make_optimizer(tf)

    @tf.function
    def graph(target):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sampled_softmax_loss(weight, bias, target, hidden, K, num_classes))
        rows, shifts, back = tape.gradient(loss, [weight, bias, hidden])
        if optimizer is None:
            # What is not returned would not be computed.
            return loss, back, rows.values, shifts.values
        optimizer.apply_gradients([(rows, weight), (shifts, bias)])
        return loss, back

    batches = itertools.cycle([tf.constant(target[:, None]) for target in targets])
    return lambda: graph(next(batches))[0].numpy()
