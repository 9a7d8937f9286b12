"""Numbers that others published, which planner_studies.py compares the planner with.

Frontier: arXiv 2404.11706 and the benchmark behind it, whose plotting scripts hold the numbers; 8 GCDs of MI250X a
node, 32 images a GCD, PyTorch's first FSDP.
GH200: torchtitan-mae, a masked autoencoder of volume EM; 4 GPUs a node, a crop of 512^3 a GPU. ORBIT: arXiv 2404.14712.
"""

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
MODELS = ("base", "huge", "1b", "3b")  # of which memory was published by strategy

IMAGES_PER_SECOND: dict[tuple[str, str], tuple[int | None, ...]] = {  # by nodes; groups of 16 begin with two
    ("base", "DDP"): (853, 1686, 3310, 6590, 13006, 26344, 51610, 98681),
    ("base", "NO_SHARD"): (1207, 2333, 4803, 9069, 17824, 34750, 67977, 138954),
    ("base", "HYBRID_1"): (1203, 2476, 4969, 9927, 19835, 39738, 77958, 158667),
    ("base", "HYBRID_2"): (1152, 2282, 4427, 9059, 17512, 34024, 66177, 136589),
    ("base", "FULL_SHARD"): (1205, 2381, 4666, 8702, 15409, 14471, 27178, 11336),
    ("huge", "DDP"): (120, 239, 478, 934, 1844, 3740, 7365, 14879),
    ("huge", "NO_SHARD"): (239, 472, 948, 1843, 3669, 7430, 14328, 28279),
    ("huge", "HYBRID_1"): (244, 485, 975, 1942, 3877, 7767, 15512, 31141),
    ("huge", "HYBRID_2"): (236, 476, 949, 1890, 3624, 7412, 14664, 27164),
    ("huge", "FULL_SHARD"): (245, 490, 976, 1931, 3743, 7236, 8015, 10265),
    ("1b", "DDP"): (89, 179, 336, 690, 1365, 2779, 5523, 10773),
    ("1b", "NO_SHARD"): (187, 373, 745, 1435, 2807, 5802, 11460, 21603),
    ("1b", "HYBRID_1"): (189, 383, 763, 1528, 3056, 6171, 12264, 24749),
    ("1b", "HYBRID_2"): (188, 377, 753, 1454, 2871, 5611, 9585, 20453),
    ("1b", "FULL_SHARD"): (197, 387, 776, 1518, 2995, 5779, 7806, 4099),
    ("3b", "DDP"): (29, 58, 119, 228, 460, 902, 1794, 3639),
    ("3b", "NO_SHARD"): (76, 153, 301, 591, 1193, 2269, 4468, 8457),
    ("3b", "HYBRID_1"): (79, 162, 321, 648, 1286, 2523, 5141, 10274),
    ("3b", "HYBRID_2"): (79, 155, 306, 587, 1154, 2423, 4668, 7449),
    ("3b", "FULL_SHARD"): (83, 161, 323, 644, 1278, 2511, 3759, 3708),
    ("5b", "HYBRID_2"): (47, 92, 183, 352, 687, 1433, 2893, 4420),
    ("5b", "HYBRID_4"): (47, 93, 182, 362, 695, 1248, 2120, 3282),
    ("5b", "HYBRID_8"): (48, 96, 189, 388, 766, 1440, 2820, 5565),
    ("5b", "HYBRID_16"): (None, 88, 175, 349, 697, 1360, 2726, 5277),
    ("5b", "FULL_SHARD"): (50, 100, 197, 381, 768, 1307, 2306, 2262),
    ("5b", "SHARD_GRAD_OP"): (49, 99, 197, 389, 783, 1509, 2021, 4207),
    ("15b", "HYBRID_4"): (15, 30, 60, 120, 238, 473, 928, 1649),
    ("15b", "HYBRID_8"): (16, 32, 63, 127, 245, 502, 982, 1878),
    ("15b", "HYBRID_16"): (None, 31, 62, 125, 250, 500, 984, 1789),
    ("15b", "FULL_SHARD"): (18, 36, 71, 138, 283, 560, 1113, 1754),
    ("15b", "SHARD_GRAD_OP"): (18, 37, 73, 147, 271, 575, 1145, 2196),
}

ALLOCATED_GIB = {  # of a GCD on one node at most, base to 3b
    "DDP": (2.4721, 13.2812, 18.7437, 59.8159),
    "NO_SHARD": (1.9594, 10.4048, 14.691, 47.3326),
    "HYBRID_1": (1.958, 10.4049, 14.6917, 47.3302),
    "HYBRID_2": (1.3225, 5.6956, 7.9241, 24.6311),
}
ACTIVE_GIB = {
    "DDP": (2.4721, 13.2812, 18.7437, 59.8159),
    "NO_SHARD": (2.3427, 13.7845, 19.791, 61.7175),
    "HYBRID_1": (2.3266, 14.2592, 20.5347, 58.1574),
    "HYBRID_2": (1.4431, 6.0289, 8.4104, 26.2855),
}
RESERVED_GIB = {
    "DDP": (2.9863, 14.2148, 20.2227, 61.5625),
    "NO_SHARD": (2.8906, 14.8008, 21.2734, 63.2109),
    "HYBRID_1": (2.8633, 14.8828, 21.8594, 63.6133),
    "HYBRID_2": (1.9961, 7.4902, 10.875, 30.1621),
}
FULL_SHARD_ACTIVE_GIB = {  # by nodes, base to 3b
    1: (0.9464, 2.6464, 3.4272, 8.9501),
    128: (0.819, 1.7257, 2.0934, 4.0757),
}

RESERVED_15B_HYBRID_4_GIB = 63.0645
LARGE_ALLOCATED_GIB = {
    ("5b", "HYBRID_2"): 41.8989,
    ("5b", "HYBRID_4"): 22.1659,
    ("5b", "HYBRID_8"): 12.2433,
    ("5b", "HYBRID_16"): 7.5339,
    ("15b", "HYBRID_4"): 58.2116,
    ("15b", "HYBRID_8"): 31.0713,
    ("15b", "HYBRID_16"): 17.8344,
}

PREFETCH_MODES = ("FULL_SHARD", "HYBRID_2", "HYBRID_16")
PREFETCH_5B = {  # images/s on 8 nodes under these modes, by groups gathered ahead in the backward
    0: (351, 335, 335),
    1: (388, 360, 352),
}

GH200_TOKENS = {  # tokens a second and GPU, masked ones counted, by nodes and the share of masked ones
    (5, 0.01): 2040,
    (5, 0.95): 12100,
    (40, 0.01): 1910,
    (40, 0.95): 11800,
}

LADDER = {"wrapped": 1.0, "bf16": 1.97, "prefetch": 2.4, "checkpointing": 5.7}  # 113 billion, 512 GCDs, speed-up
