"""Comparison of sampling designs on a text: error, step time and trained perplexity of each, next to exact training."""

from manyclass.lab.study.run import DEFAULT as DEFAULT
from manyclass.lab.study.run import FULL as FULL
from manyclass.lab.study.run import QUICK as QUICK
from manyclass.lab.study.run import StudyResult as StudyResult
from manyclass.lab.study.run import StudyScale as StudyScale
from manyclass.lab.study.run import check_designs as check_designs
from manyclass.lab.study.run import redraw as redraw
from manyclass.lab.study.run import study as study
