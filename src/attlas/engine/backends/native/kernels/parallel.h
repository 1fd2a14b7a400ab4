// Work shared by threads.
//
// Threads come from the pool that PyTorch's OpenMP keeps: threads of our own would be started beside it at every call,
// which costs milliseconds while its threads still spin. The runtime is found in the process when the library is loaded,
// and nothing is linked. Where there is none of the kind known here, threads live for one call.
#pragma once

#include <cstddef>
#include <functional>

namespace attlas {

using Task = std::function<void(std::size_t index, int thread)>;

// Runs task(index, thread) for each index below count; each thread takes the next index when it is free. What a task throws
// ends the work early and is thrown again here, once all threads are done. There is a checkpoint (interrupt.h) before each
// task. All threads that PyTorch uses are asked for, also where there is less to do: a pool ends those that it does not need.
// In api.cpp.
void share(std::size_t count, int threads, const Task& task);

}  // namespace attlas
