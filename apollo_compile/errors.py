"""Every exception of the package.

ApolloError
|-- ConfigError            an option or environment variable is unknown or has a wrong value
|-- UnsupportedGraphError  a graph cannot run in segments, so it falls back to Inductor
|-- PlanFileError          a plan file cannot be read, or is for another graph or device
|-- ReportFileError        a file is not a report
|-- InfeasiblePlanError    no plan meets the memory quota
|-- CudaError              a CUDA driver call failed, or the driver lacks what lanes need
|-- RankError              this rank cannot run what the ranks of its job agreed on, so it stops
|-- PipelinePlanError      a pipeline or its plan cannot run, or breaks a limit
|-- MemoryQuotaError       a lane took more memory than its quota
|-- SampleError            the size or cost of a sample is missing or unusable
|-- TargetError            a model or its inputs cannot be built or traced
|-- InvariantError         a product is not legal: a bug of ours, found by the check after a stage
`-- RuntimeClosedError     the runtime was used after it was closed, or from a forked child

A message says what failed, what was expected and found, where, and what to do.
"""

from __future__ import annotations


class ApolloError(Exception):
    """Base of every exception that apollo_compile raises itself."""


class ConfigError(ApolloError, ValueError):
    """An option or environment variable is unknown or has a wrong value."""


class UnsupportedGraphError(ApolloError):
    """A graph has something that segments cannot express; the message says what and where."""


class PlanFileError(ApolloError, ValueError):
    """A plan file cannot be read, or its plan is for another graph or other lanes."""


class ReportFileError(ApolloError, ValueError):
    """A text or file is not a report, or has another format."""


class InfeasiblePlanError(ApolloError):
    """No schedule meets all limits; the message says which limit fails and what needs most."""


class CudaError(ApolloError, RuntimeError):
    """A CUDA driver call failed, or the driver is missing or too old; the message says which call and what to do."""


class NotReplayedError(ApolloError):
    """A program that only runs as a CUDA graph cannot be replayed now, and nothing has run; the message says why."""


class CaptureError(ApolloError, RuntimeError):
    """A CUDA graph could not be captured, and nothing has run; the message says what failed."""


class RankError(ApolloError, RuntimeError):
    """This rank cannot obtain or run what the ranks of its job agreed on; the message says what differs."""


class PipelinePlanError(ApolloError, ValueError):
    """A schedule or plan of a pipeline cannot run, or breaks a limit; the message names rank and micro-batch."""


class MemoryQuotaError(ApolloError):
    """A lane took more memory than its quota; the message names the lane, its segments, and the bytes."""


class SampleError(ApolloError, ValueError):
    """The size or cost of a sample is missing, negative or not a number; the message names the sample."""


class TargetError(ApolloError):
    """A model and its inputs cannot be built, copied or traced; the message says which and why."""


class InvariantError(ApolloError):
    """A product failed the check after its stage."""


class RuntimeClosedError(ApolloError, RuntimeError):
    """Lanes were used after they were closed, or in a process that does not own them."""
