"""Reports: figures and tables in one self-contained page, and every figure as PNG and SVG."""

from manyclass.report.content import Curve as Curve
from manyclass.report.content import Figure as Figure
from manyclass.report.content import Panel as Panel
from manyclass.report.content import Report as Report
from manyclass.report.content import ReportTable as ReportTable
from manyclass.report.content import Section as Section
from manyclass.report.write import WrittenReport as WrittenReport
from manyclass.report.write import check_libraries as check_libraries
from manyclass.report.write import write_report as write_report
