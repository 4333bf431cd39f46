"""The training loop for an encoder and a head, with callbacks, checkpoints and evaluation."""

from manyclass._check import DivergedError as DivergedError
from manyclass.training.batch import Batch as Batch
from manyclass.training.callback import Callback as Callback
from manyclass.training.checkpoints import Checkpoints as Checkpoints
from manyclass.training.checkpoints import load_checkpoint as load_checkpoint
from manyclass.training.csv_log import CSVLog as CSVLog
from manyclass.training.evaluate import Evaluation as Evaluation
from manyclass.training.evaluate import HeldOut as HeldOut
from manyclass.training.evaluate import NoExamplesError as NoExamplesError
from manyclass.training.evaluate import evaluate as evaluate
from manyclass.training.history import History as History
from manyclass.training.history import Progress as Progress
from manyclass.training.history import Record as Record
from manyclass.training.loop import Training as Training
from manyclass.training.precision import fast_products as fast_products
from manyclass.training.progress_line import ProgressLine as ProgressLine
from manyclass.training.ranks import ALONE as ALONE
from manyclass.training.ranks import Ranks as Ranks
from manyclass.training.replay import ReplayedStep as ReplayedStep
from manyclass.training.tensorboard_log import TensorBoardLog as TensorBoardLog
