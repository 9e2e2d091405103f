/* Vectors of four floats: what any x86-64 and any ARM64 has. */
#include <math.h>
#include <stddef.h>
#include <string.h>
#include "kernels.h"
#include "team.h"
#define VL 4
#define ISA portable
#include "body.h"
