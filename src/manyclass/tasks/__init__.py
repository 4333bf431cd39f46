"""Data, encoder and training together: from files to trained models and their predictions."""

from manyclass.tasks.accuracy import error_figure as error_figure
from manyclass.tasks.accuracy import error_summary as error_summary
from manyclass.tasks.catalog import TASKS as TASKS
from manyclass.tasks.divide import divide as divide
from manyclass.tasks.features import LabelledChunks as LabelledChunks
from manyclass.tasks.fit import fit as fit
from manyclass.tasks.fit import resume as resume
from manyclass.tasks.manifest import read_manifest as read_manifest
from manyclass.tasks.measure import Band as Band
from manyclass.tasks.measure import Measured as Measured
from manyclass.tasks.measure import measure as measure
from manyclass.tasks.model import Model as Model
from manyclass.tasks.model import open_model as open_model
from manyclass.tasks.page import report_of as report_of
from manyclass.tasks.predict import Prediction as Prediction
from manyclass.tasks.predict import open_index as open_index
from manyclass.tasks.predict import predict as predict
from manyclass.tasks.settings import Settings as Settings
from manyclass.tasks.task import Source as Source
from manyclass.tasks.task import Task as Task
from manyclass.tasks.task import TrainingData as TrainingData
from manyclass.tasks.task import check_settings as check_settings
from manyclass.tasks.task import check_source as check_source
from manyclass.tasks.train import Fitted as Fitted
from manyclass.tasks.train import RunOptions as RunOptions
from manyclass.tasks.train import train as train
