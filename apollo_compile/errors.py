"""The exceptions of the package.

ApolloError
|-- ConfigError            an option or environment variable is unknown or has a wrong value
|-- UnsupportedGraphError  a graph cannot run in segments, so it falls back to Inductor
|-- PlanFileError          a plan file cannot be read, or is for another graph or device
|-- ReportFileError        a text or file is not a report
|-- InfeasiblePlanError    no plan meets the memory quota
|-- CudaError              a CUDA driver call failed, or the driver does not support lanes
|-- NotReplayedError       a program that runs only as a CUDA graph cannot be replayed now
|-- CaptureError           a CUDA graph could not be captured
|-- RankError              this rank cannot run the plans that the ranks of its job agreed on, so it stops
|-- PipelinePlanError      a pipeline or its plan cannot run, or breaks a limit
|-- ClusterError           a cluster, its jobs, or a plan for them cannot be read or run
|-- DeploymentError        a plan over several devices is for another model or job, or cannot be made or run
|-- MemoryQuotaError       a lane took more memory than its quota
|-- SampleError            the size or cost of a sample is missing or unusable
|-- TargetError            a model or its inputs cannot be built or traced
|-- InvariantError         a product failed the check after its stage, which is a defect of this package
`-- RuntimeClosedError     the runtime was used after it was closed, or from a forked child

A message has the failure, the expected and the found value, the place and the remedy.
"""

from __future__ import annotations


class ApolloError(Exception):
    """Base of all exceptions of apollo_compile."""


class ConfigError(ApolloError, ValueError):
    """An option or environment variable is unknown or has a wrong value."""


class UnsupportedGraphError(ApolloError):
    """Segments cannot run a graph; the message names the node and the reason."""


class PlanFileError(ApolloError, ValueError):
    """A plan file cannot be read, or its plan is for another graph or other lanes."""


class ReportFileError(ApolloError, ValueError):
    """A text or file is not a report, or has another format."""


class InfeasiblePlanError(ApolloError):
    """No schedule keeps all limits; the message names the limit and the segment that needs most."""


class CudaError(ApolloError, RuntimeError):
    """A CUDA driver call failed, or the driver is missing or too old; the message names the call and the remedy."""


class NotReplayedError(ApolloError):
    """A program that runs only as a CUDA graph cannot be replayed, and nothing has run; the message has the reason."""


class CaptureError(ApolloError, RuntimeError):
    """A CUDA graph could not be captured, and nothing has run; the message names the failure."""


class RankError(ApolloError, RuntimeError):
    """This rank cannot obtain or run the plans that the ranks of its job agreed on; the message has the reason."""


class PipelinePlanError(ApolloError, ValueError):
    """A schedule or plan of a pipeline cannot run, or breaks a limit; the message names rank and micro-batch."""


class ClusterError(ApolloError, ValueError):
    """A cluster, its jobs or a plan for them cannot be read or run; the message names the file and line, or the job."""


class DeploymentError(ApolloError, ValueError):
    """A plan over several devices cannot be made, read or run; the message names the module."""


class MemoryQuotaError(ApolloError):
    """A lane took more memory than its quota; the message names the lane, its segments, and the bytes."""


class SampleError(ApolloError, ValueError):
    """The size or cost of a sample is missing, negative or not a number; the message names the sample."""


class TargetError(ApolloError):
    """A model or its inputs cannot be built, copied or traced; the message has the reason."""


class CallError(TargetError):
    """A command or function was called with something that does not exist or cannot be written; nothing was run."""


class InvariantError(ApolloError):
    """A product failed the check after its stage."""


class RuntimeClosedError(ApolloError, RuntimeError):
    """Lanes were used after they were closed, or in a process that does not own them."""
