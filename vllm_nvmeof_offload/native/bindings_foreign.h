// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_foreign(nb::module_& m);
