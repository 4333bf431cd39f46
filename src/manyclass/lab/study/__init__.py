"""Which sampling design to use on a text: errors, times and trainings of all of them, beside exact training."""

from manyclass.lab.study.run import DEFAULT as DEFAULT
from manyclass.lab.study.run import FULL as FULL
from manyclass.lab.study.run import QUICK as QUICK
from manyclass.lab.study.run import Done as Done
from manyclass.lab.study.run import StudyScale as StudyScale
from manyclass.lab.study.run import check_designs as check_designs
from manyclass.lab.study.run import redraw as redraw
from manyclass.lab.study.run import study as study
