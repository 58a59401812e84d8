#pragma once

// Everything a program needs.

#include "topreduce/catalog.h"
#include "topreduce/comm/self.h"
#include "topreduce/comm/thread.h"
#include "topreduce/reducer.h"
#include "topreduce/version.h"
