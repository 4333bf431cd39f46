"""Training on several processes."""

from manyclass.parallel.prepare import prepare as prepare
