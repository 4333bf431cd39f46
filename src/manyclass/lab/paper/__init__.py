"""Reproduction of Barber & Botev, "Dealing with a large number of classes"."""

from manyclass.lab.paper.reproduce import DEFAULT as DEFAULT
from manyclass.lab.paper.reproduce import EXPERIMENTS as EXPERIMENTS
from manyclass.lab.paper.reproduce import FULL as FULL
from manyclass.lab.paper.reproduce import QUICK as QUICK
from manyclass.lab.paper.reproduce import Reproduction as Reproduction
from manyclass.lab.paper.reproduce import reproduce as reproduce
