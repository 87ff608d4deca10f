// The common parts of the C functions: handles, exceptions, the error text.
#pragma once

#include "handle.h"
#include "log.h"
#include "ranges.h"
#include "session.h"

#include <new>
#include <string>

namespace epd::client {

// An opaque handle is the address of a Handle, which outlives its object (handle.h). The C types are never
// defined.
inline Session* object_of(const epd_session_t* session) {
  return reinterpret_cast<const Handle<Session>*>(session)->object();
}
inline Group* object_of(const epd_group_t* group) {
  return reinterpret_cast<const Handle<Group>*>(group)->object();
}

// WOULD_BLOCK is an answer, not a failure.
inline void log_failure(const char* call, const Status& status) {
  const LogLevel level = status.code() == StatusCode::kWouldBlock ? LogLevel::kDebug : LogLevel::kError;
  if (!logs(level)) return;  // before any text is made: a poll may be refused again and again
  log_line(level, "call failed",
           {{"call", call}, {"status", status_name(status.code())}, {"text", status.message()}});
}

// Runs the body of a C function. Nothing may be thrown into the caller.
template <typename Body>
epd_status_t guarded(Body body, const char* call = __builtin_FUNCTION()) noexcept {
  try {
    const Status status = body();
    if (!status.ok()) log_failure(call, status);
    return report(status);
  } catch (const std::bad_alloc&) {
    return report(StatusCode::kResourceExhausted, "out of memory");
  } catch (const std::exception& error) {
    return report(StatusCode::kInternal, error.what());
  } catch (...) {
    return report(StatusCode::kInternal, "unknown exception");
  }
}

// The same in a range that profilers show, by the function's name without "epd_".
template <typename Body>
epd_status_t ranged(Body body, const char* call = __builtin_FUNCTION()) noexcept {
  const Range range(call + sizeof("epd_") - 1);
  return guarded(body, call);
}

inline Status missing(const char* name) {
  return invalid_argument(std::string(name) + " is NULL");
}

#define EPD_REQUIRE(pointer) \
  if ((pointer) == nullptr) return epd::client::missing(#pointer)
#define EPD_RETURN_IF_ERROR(expression) \
  if (epd::Status early = (expression); !early.ok()) return early

inline const Session& session_of(const Session& session) {
  return session;
}
inline const Session& session_of(const Group& group) {
  return *group.session;
}

// Sets `object` to the one behind the handle. Fails if the handle may not be used.
template <typename CHandle, typename Object>
Status open_handle(const CHandle* handle, const char* name, Object*& object) {
  if (handle == nullptr) return missing(name);
  object = object_of(handle);
  if (object == nullptr)
    return invalid_argument(std::string(name) + " is a handle that is no more: detached, or left, already");
  return session_of(*object).in_home_process();
}

// Declares `object`, and returns from the function if the handle may not be used.
#define EPD_OPEN(Type, object, handle) \
  Type* object = nullptr;              \
  EPD_RETURN_IF_ERROR(epd::client::open_handle(handle, #handle, object))

}  // namespace epd::client
