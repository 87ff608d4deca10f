// Texts of --help: what a man page would say.
#pragma once

namespace epd::ctl::help {

extern const char* const kProgram;
extern const char* const kProgramFooter;

struct Page {
  const char* summary;  // one line, for the list of commands
  const char* text;     // below the options
};
extern const Page kStatus;
extern const Page kDevices;
extern const Page kNodes;
extern const Page kNetwork;
extern const Page kSessions;
extern const Page kGroups;
extern const Page kOps;
extern const Page kConfig;
extern const Page kSize;
extern const Page kDrain;
extern const Page kDoctor;
extern const Page kVersion;
extern const Page kOp;
extern const Page kStats;
extern const Page kWaits;
extern const Page kEvents;
extern const Page kWatch;
extern const Page kSet;
extern const Page kSetDevice;
extern const Page kSetGroup;
extern const Page kSetLog;
extern const Page kSetLimits;
extern const Page kHealth;
extern const Page kReload;
extern const Page kEvict;
extern const Page kEvictSession;
extern const Page kEvictGroup;
extern const Page kRestart;
extern const Page kRestartDevice;
extern const Page kCompletion;

}  // namespace epd::ctl::help
