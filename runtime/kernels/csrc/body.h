/* Everything for one instruction set: included with VL (floats in a vector) and ISA set, and its target switched on. */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(x) JOIN(x, ISA)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define ISA_NAME TEXT(ISA)
#include "vector.h"
#include "linear.h"
#include "elementwise.h"
#include "attention.h"
#include "sampling.h"
#include "forward.h"
