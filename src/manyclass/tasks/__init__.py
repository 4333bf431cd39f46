"""Kinds of data, from files to trained models and their answers."""

from manyclass.tasks.began import read_about as read_about
from manyclass.tasks.features import LabelledChunks as LabelledChunks
from manyclass.tasks.fit import Fit as Fit
from manyclass.tasks.fit import Fitted as Fitted
from manyclass.tasks.fit import fit as fit
from manyclass.tasks.fit import resume as resume
from manyclass.tasks.fit import train as train
from manyclass.tasks.kinds import KINDS as KINDS
from manyclass.tasks.measure import Band as Band
from manyclass.tasks.measure import Measured as Measured
from manyclass.tasks.measure import measure as measure
from manyclass.tasks.model import Model as Model
from manyclass.tasks.model import open_model as open_model
from manyclass.tasks.page import report_of as report_of
from manyclass.tasks.predict import Answer as Answer
from manyclass.tasks.predict import open_index as open_index
from manyclass.tasks.predict import predict as predict
from manyclass.tasks.settings import Settings as Settings
from manyclass.tasks.task import Source as Source
from manyclass.tasks.task import Task as Task
from manyclass.tasks.task import check_settings as check_settings
from manyclass.tasks.task import check_source as check_source
