"""A report: figures and tables in one page that opens anywhere, and each figure as a picture of its own."""

from manyclass.report.content import Curve as Curve
from manyclass.report.content import Figure as Figure
from manyclass.report.content import Panel as Panel
from manyclass.report.content import Report as Report
from manyclass.report.content import Section as Section
from manyclass.report.content import Table as Table
from manyclass.report.write import Written as Written
from manyclass.report.write import check_libraries as check_libraries
from manyclass.report.write import write_report as write_report
