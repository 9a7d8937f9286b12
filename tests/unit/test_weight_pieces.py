"""Pieces that weights of others are made of: tables of positions, tokens before the patches."""

import torch
import torch.nn.functional as F

from vitrail.weights.pieces import first_rows, position_table, resize


def test_rows_before_the_patches_are_no_positions_of_patches() -> None:
    table = torch.arange(2 + 6).float().view(1, 8, 1).expand(1, 8, 3)
    made = position_table(table, old=(2, 3), new=(2, 3), skip=2)
    assert made.value[:, 0].tolist() == [2, 3, 4, 5, 6, 7]
    assert made.action == "copied"
    deep = position_table(table, old=(2, 3), new=(4, 2, 3), skip=2)
    assert deep.value[:, 0].tolist() == [2, 3, 4, 5, 6, 7] * 4


def test_a_table_is_smoothed_where_it_shrinks() -> None:
    """What alternates from patch to patch is nearly gone at half the size; without a filter, cubic weights keep it."""
    rows = torch.tensor([1.0, -1.0]).repeat(8).view(1, 16).expand(16, 16).reshape(256, 1)
    assert float(resize(rows, (16, 16), (6, 6)).abs().max()) < 0.2
    unfiltered = F.interpolate(rows.view(1, 1, 16, 16), (6, 6), mode="bicubic", align_corners=False)
    assert float(unfiltered.abs().max()) > 0.5
    grown = resize(rows, (16, 16), (32, 32)).view(32, 32)
    torch.testing.assert_close(grown[0], grown[31])


def test_a_class_token_starts_as_its_sum_with_its_position() -> None:
    token, registers, table = torch.full((1, 1, 3), 5.0), torch.full((1, 2, 3), 9.0), torch.arange(12.0).view(1, 4, 3)
    made = first_rows(token, registers, table, counts=(1, 2), added=1)
    assert made.value.tolist() == [[5, 6, 7], [9, 9, 9], [9, 9, 9]]
    plain = first_rows(token, registers, counts=(1, 2))
    assert plain.value.tolist() == [[5, 5, 5], [9, 9, 9], [9, 9, 9]]
