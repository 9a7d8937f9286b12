#!/bin/bash
# {{ title }}
# Written by: {{ written_by }}
# It is yours to edit.
