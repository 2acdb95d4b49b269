// Tensor parallelism for programs of LibTorch: groups, regions, layers, loss, files of weights, exported
// models.

#pragma once

#include "tp_ext/exported_model.h"
#include "tp_ext/functions.h"
#include "tp_ext/group.h"
#include "tp_ext/nn.h"
#include "tp_ext/safetensors.h"
