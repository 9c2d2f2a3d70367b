"""A matrix product whose library may be chosen: `Matmul`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """A matmul of two float32 matrices, with an optional bias that is added to each row."""

    rows: int
    inner: int
    """Columns of the left matrix, rows of the right one."""
    columns: int
    is_left_transposed: bool
    """Whether the left matrix is column-major."""
    is_right_transposed: bool
    has_bias: bool

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.inner * self.columns

    @property
    def num_bytes(self) -> int:
        """Size of all three matrices."""
        return 4 * (self.rows * self.inner + self.inner * self.columns + self.rows * self.columns)

    @property
    def name(self) -> str:
        """Name of the matmul in files."""
        marks = "T" * self.is_left_transposed, "T" * self.is_right_transposed, "+bias" * self.has_bias
        return f"{self.rows}x{self.inner}{marks[0]} {self.inner}x{self.columns}{marks[1]}{marks[2]}"
